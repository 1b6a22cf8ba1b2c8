package main

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"k8s.io/kubernetes/test/utils/image"
)

// debian lists the Debian packages of the programs that upstream's test images contain, and
// of those that the two proxies use. Upstream's images use Alpine Linux and need a registry.
var debian = []string{
	"bash", "bind9-dnsutils", "busybox", "ca-certificates", "conntrack", "curl", "iperf", "iproute2", "iptables",
	"iputils-ping", "netcat-openbsd", "nftables", "procps", "socat", "wget",
}

const debianSuite = "bookworm"

// pauseImage returns the name of the image that containerd uses for a pod's sandbox.
func pauseImage() string { return image.GetE2EImage(image.Pause) }

type containerImage struct {
	names           []string
	layers          []string // folders
	entrypoint, cmd []string
}

// makeImages writes the archive of all container images that tests of [sig-network] use,
// unless the archive exists.
func (s settings) makeImages(ctx context.Context) (err error) {
	archive := s.imageArchive()
	if _, err := os.Stat(archive); err == nil {
		return nil
	}
	fmt.Println("building container images")
	base := s.rootfs()
	if _, err := os.Stat(base); err != nil {
		fmt.Println("building a Debian file system for the images")
		os.RemoveAll(base + ".tmp")
		cmd := exec.CommandContext(ctx, "debootstrap", "--variant=minbase", "--include="+strings.Join(debian, ","), debianSuite, base+".tmp")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("debootstrap: %w\n%s", err, out)
		}
		if err := os.Rename(base+".tmp", base); err != nil {
			return err
		}
	}
	source, err := output(ctx, "go", "list", "-m", "-f", "{{.Dir}}", upstream)
	if err != nil {
		return fmt.Errorf("cannot find the sources of Kubernetes (run this in folder e2e/cluster): %w", err)
	}
	tmp, err := os.MkdirTemp(s.Dir, ".images-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	layer := func(name string) string { return filepath.Join(tmp, name) }

	agnhost := filepath.Join(source, "test", "images", "agnhost")
	for _, f := range []struct {
		path, from string
		mode       os.FileMode
	}{
		{layer("agnhost/agnhost"), filepath.Join(s.bin(), "agnhost"), 0o755},
		{layer("agnhost/coredns"), filepath.Join(s.bin(), "coredns"), 0o755}, // for tests with a DNS server of their own
		{layer("agnhost/localhost.crt"), filepath.Join(agnhost, "porter", "localhost.crt"), 0o644},
		{layer("agnhost/localhost.key"), filepath.Join(agnhost, "porter", "localhost.key"), 0o644},
		{layer("issue/regression-issue-74839"), filepath.Join(s.bin(), "regression-issue-74839"), 0o755},
	} {
		if err := copyFile(f.path, f.from, f.mode); err != nil {
			return err
		}
	}
	if err := os.Symlink("agnhost", layer("agnhost/agnhost-2")); err != nil {
		return err
	}
	if err := os.MkdirAll(layer("agnhost/uploads"), 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(layer("agnhost/etc"), 0o755); err != nil {
		return err
	}
	// The tests expect BusyBox's wget, which tries once. GNU wget, which is installed here,
	// tries 20 times by default.
	if err := os.WriteFile(layer("agnhost/etc/wgetrc"), []byte("tries = 1\n"), 0o644); err != nil {
		return err
	}
	if err := os.MkdirAll(layer("pause"), 0o755); err != nil {
		return err
	}
	if _, err := output(ctx, "gcc", "-Os", "-static", "-o", layer("pause/pause"), filepath.Join(source, "build", "pause", "linux", "pause.c")); err != nil {
		return err
	}
	full := []string{base, layer("agnhost")}
	return writeArchive(ctx, archive, tmp, []containerImage{
		{[]string{image.GetE2EImage(image.Agnhost)}, full, []string{"/agnhost"}, []string{"pause"}},
		{[]string{image.GetE2EImage(image.BusyBox), image.GetE2EImage(image.DistrolessIptables), image.GetE2EImage(image.GlibcDnsTesting)}, full, nil, []string{"/bin/sh"}},
		{[]string{image.GetE2EImage(image.Nginx)}, full, nil, []string{"/agnhost", "test-webserver", "--port=80"}},
		{[]string{image.GetE2EImage(image.RegressionIssue74839)}, []string{base, layer("issue")}, []string{"/regression-issue-74839"}, nil},
		{[]string{pauseImage()}, []string{layer("pause")}, []string{"/pause"}, nil},
	})
}

// rootfs returns the folder of the Debian file system for the images.
func (s settings) rootfs() string { return filepath.Join(s.Dir, "rootfs-"+debianSuite) }

// writeArchive writes images in the format of "docker save": a manifest, and for each
// image its layers and its configuration, which holds the layers' digests.
func writeArchive(ctx context.Context, path, tmp string, images []containerImage) (err error) {
	f, err := os.Create(filepath.Join(tmp, "images.tar"))
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	add := func(name string, content []byte) error {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			return err
		}
		_, err := w.Write(content)
		return err
	}
	type entry struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	var manifest []entry
	digests := map[string]string{} // of the layers written so far, by folder
	for _, i := range images {
		e := entry{RepoTags: i.names}
		var diffIDs []string
		for _, dir := range i.layers {
			if digests[dir] == "" {
				if digests[dir], err = addLayer(ctx, w, tmp, dir); err != nil {
					return err
				}
			}
			diffIDs = append(diffIDs, "sha256:"+digests[dir])
			e.Layers = append(e.Layers, digests[dir]+".tar")
		}
		config, err := json.Marshal(map[string]any{
			"architecture": runtime.GOARCH,
			"os":           "linux",
			"config": map[string]any{
				"Env":        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
				"Entrypoint": i.entrypoint,
				"Cmd":        i.cmd,
				"WorkingDir": "/",
			},
			"rootfs": map[string]any{"type": "layers", "diff_ids": diffIDs},
		})
		if err != nil {
			return err
		}
		sum := sha256.Sum256(config)
		e.Config = hex.EncodeToString(sum[:]) + ".json"
		if err := add(e.Config, config); err != nil {
			return err
		}
		manifest = append(manifest, e)
	}
	b, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	if err := add("manifest.json", b); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// addLayer adds a folder's files as a layer and returns the layer's SHA-256 digest. It
// leaves out documentation and the package manager's caches.
func addLayer(ctx context.Context, w *tar.Writer, tmp, dir string) (digest string, err error) {
	layer := filepath.Join(tmp, "layer.tar")
	args := []string{"tar", "-C", dir, "--numeric-owner", "--sort=name", "-cf", layer}
	for _, d := range []string{"usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"} {
		args = append(args, "--exclude=./"+d+"/*")
	}
	if _, err := output(ctx, append(args, ".")...); err != nil {
		return "", err
	}
	f, err := os.Open(layer)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	size, err := io.Copy(sum, f)
	if err != nil {
		return "", err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	digest = hex.EncodeToString(sum.Sum(nil))
	if err := w.WriteHeader(&tar.Header{Name: digest + ".tar", Mode: 0o644, Size: size}); err != nil {
		return "", err
	}
	_, err = io.Copy(w, f)
	return digest, err
}

func copyFile(to, from string, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}
