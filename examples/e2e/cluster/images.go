package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"k8s.io/kubernetes/test/utils/image"
)

// debian has the Debian packages of the programs that upstream's test images contain, and
// of those that the two proxies use. Upstream's images use Alpine Linux and need a registry.
const debian = "bash,bind9-dnsutils,busybox,ca-certificates,conntrack,curl,iperf,iproute2,iptables," +
	"iputils-ping,netcat-openbsd,nftables,procps,socat,wget"

// pauseImage returns the name of the image that containerd uses for a pod's sandbox.
func pauseImage() string { return image.GetE2EImage(image.Pause) }

type containerImage struct{ names, entrypoint, cmd []string }

// makeImages writes the archive of all container images that tests of [sig-network] use. All have the same
// file system.
func (s settings) makeImages(ctx context.Context) error {
	source, err := output(ctx, "go", "list", "-m", "-f", "{{.Dir}}", upstream)
	if err != nil {
		return err
	}
	fmt.Println("building a Debian file system and container images")
	// The tests expect BusyBox's wget, which tries once. GNU wget, which is installed here,
	// tries 20 times by default. CoreDNS is for tests with a DNS server of their own.
	const script = `rm -rf "$0"
debootstrap --variant=minbase --include="$1" bookworm "$0"
cp "$2/agnhost" "$0/agnhost-2"
cp "$2/agnhost" "$2/coredns" "$2/regression-issue-74839" "$3"/localhost.crt "$3"/localhost.key "$0"
mkdir "$0/uploads"
echo tries = 1 >"$0/etc/wgetrc"`
	if _, err := output(ctx, "sh", "-ec", script, s.rootfs(), debian, s.bin(), filepath.Join(source, "test/images/agnhost/porter")); err != nil {
		return err
	}
	return s.writeArchive(ctx, filepath.Base(s.imageArchive()), []containerImage{
		{[]string{image.GetE2EImage(image.Agnhost)}, []string{"/agnhost"}, []string{"pause"}},
		{[]string{image.GetE2EImage(image.BusyBox), image.GetE2EImage(image.DistrolessIptables), image.GetE2EImage(image.GlibcDnsTesting)}, nil, []string{"/bin/sh"}},
		{[]string{image.GetE2EImage(image.Nginx)}, nil, []string{"/agnhost", "test-webserver", "--port=80"}},
		{[]string{image.GetE2EImage(image.RegressionIssue74839)}, []string{"/regression-issue-74839"}, nil},
		{[]string{pauseImage()}, []string{"/bin/busybox", "sleep", "1000000000"}, nil},
	})
}

// writeArchive writes images of the file system to a file beside the programs, in the format of "docker
// save": a manifest, the layer, and for each image its configuration, which holds the layer's digest. It
// leaves out documentation and the package manager's caches.
func (s settings) writeArchive(ctx context.Context, file string, images []containerImage) error {
	tmp, err := os.MkdirTemp(s.Dir, ".images-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	layer := []string{"tar", "-C", s.rootfs(), "--numeric-owner", "--sort=name", "-cf", filepath.Join(tmp, "layer.tar")}
	for _, d := range []string{"usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"} {
		layer = append(layer, "--exclude=./"+d+"/*")
	}
	if _, err := output(ctx, append(layer, ".")...); err != nil {
		return err
	}
	digest, err := output(ctx, "sha256sum", filepath.Join(tmp, "layer.tar"))
	if err != nil {
		return err
	}
	digest, _, _ = strings.Cut(digest, " ")
	type entry struct {
		Config           string
		RepoTags, Layers []string
	}
	var manifest []entry
	write := func(name string, content any) {
		b, failed := json.Marshal(content)
		err = errors.Join(err, failed, os.WriteFile(filepath.Join(tmp, name), b, 0o644))
	}
	for n, i := range images {
		e := entry{fmt.Sprintf("%d.json", n), i.names, []string{"layer.tar"}}
		write(e.Config, map[string]any{
			"architecture": runtime.GOARCH,
			"os":           "linux",
			"config": map[string]any{
				"Env":        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
				"Entrypoint": i.entrypoint,
				"Cmd":        i.cmd,
				"WorkingDir": "/",
			},
			"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest}},
		})
		manifest = append(manifest, e)
	}
	write("manifest.json", manifest)
	if err != nil {
		return err
	}
	if _, err := output(ctx, "tar", "-C", tmp, "--exclude=./archive", "-cf", filepath.Join(tmp, "archive"), "."); err != nil {
		return err
	}
	return os.Rename(filepath.Join(tmp, "archive"), s.bin(file))
}
