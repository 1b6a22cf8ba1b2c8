package main

import (
	"bytes"
	"io"
	"net"
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

func TestRemoteCommandHasOutputAndStatus(t *testing.T) {
	conn := remoteConnection(t)
	var stdout, stderr bytes.Buffer
	r := request{Node: "n1", Path: "/bin/sh", Args: []string{"sh", "-c", "hostname; echo $word >&2; exit 3"}, Env: []string{"PATH=/usr/bin:/bin", "word=complaint"}}
	status, err := r.send(conn, &stdout, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	if stdout.String() != "inside\n" || stderr.String() != "complaint\n" || status != 3 {
		t.Errorf("the command wrote %q and %q, status %d", &stdout, &stderr, status)
	}
}

// The shell's child says that it is ready: one that has forked and executes nothing yet may still
// have the shell's handler of SIGTERM, and would outlive the shell.
func TestRemoteCommandEndsWithItsCaller(t *testing.T) {
	conn := remoteConnection(t)
	read, write := io.Pipe()
	go func() {
		io.ReadFull(read, make([]byte, len("ready\n")))
		conn.CloseWrite()
	}()
	var stderr bytes.Buffer
	r := request{Node: "n1", Path: "/bin/sh", Args: []string{"sh", "-c", "trap 'kill $!; exit 5' TERM; sh -c 'echo ready; exec sleep 1000' & wait"}}
	status, err := r.send(conn, write, &stderr)
	if err != nil || status != 5 {
		t.Errorf("status %d, error %v, %s; want the status of the signal's handler, 5", status, err, &stderr)
	}
}

// remoteConnection returns a connection to a server of commands in a node "n1", whose host's name
// is "inside".
func remoteConnection(t *testing.T) *net.TCPConn {
	t.Helper()
	pids := map[string]int{"n1": newNamespaces(t)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go serveRemote(l, pids)
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn)
}
