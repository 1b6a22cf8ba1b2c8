package main

import (
	"slices"
	"testing"
)

func TestModuleIsLoadedAfterItsDependencies(t *testing.T) {
	const dependencies = `kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko
kernel/net/9p/9pnet.ko:
kernel/fs/fscache/fscache.ko: kernel/fs/netfs/netfs.ko
kernel/fs/netfs/netfs.ko: kernel/lib/zlib.ko
kernel/lib/zlib.ko:
kernel/net/9p/9pnet_virtio.ko: kernel/net/9p/9pnet.ko
`
	got, err := loadOrder(dependencies, []string{"9p", "9pnet_virtio"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"kernel/net/9p/9pnet.ko", "kernel/lib/zlib.ko", "kernel/fs/netfs/netfs.ko", "kernel/fs/9p/9p.ko", "kernel/net/9p/9pnet_virtio.ko",
	}
	if !slices.Equal(got, want) {
		t.Errorf("order is %q, want %q", got, want)
	}
	if _, err := loadOrder(dependencies, []string{"overlay"}); err == nil {
		t.Error("no error for a module that is not there")
	}
}
