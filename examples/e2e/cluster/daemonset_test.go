package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const deploy = "../../nodeproxy/deploy"

func TestManifestIsAdapted(t *testing.T) {
	text, err := readBase(filepath.Join(deploy, "base"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := adapt(text, "iptables", false)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"    mode: iptables\n", "value: " + controlIP + "}", "    conntrack: {maxPerCore: 0}\n", "clusterCIDR: " + podRange + "\n", "add: [NET_ADMIN, NET_RAW]"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	got, err = adapt(text, "nftables", false)
	if err != nil || !strings.Contains(got, "    nodePortAddresses: [primary,localhost]\n") {
		t.Errorf("error %v, or no NodePorts at loopback addresses in\n%s", err, got)
	}
	if _, err := adapt(strings.ReplaceAll(text, "api.cluster.example", "api"), "iptables", true); err == nil {
		t.Error("a manifest without the API server's address is accepted")
	}
}

// TestRecipeIsFollowed follows the Containerfile with a program that is built in no time.
func TestRecipeIsFollowed(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(deploy, "Containerfile"))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for name, content := range map[string]string{"go.mod": "module m\n", "examples/nodeproxy/main.go": "package main\n\nfunc main() {}\n"} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tmp := t.TempDir()
	image, err := follow(context.Background(), string(text), root, tmp)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(image.entrypoint, []string{"/usr/local/bin/nodeproxy"}) || !slices.Equal(image.cmd, []string{"run"}) || len(image.layers) != 1 {
		t.Errorf("the image is %+v", image)
	}
	// kubeadm's DaemonSet calls the program by this name.
	program, err := os.Stat(filepath.Join(image.layers[0], "usr/local/bin/kube-proxy"))
	if err != nil || program.Mode()&0o111 == 0 {
		t.Errorf("no program kube-proxy: %v", err)
	}
	for _, change := range [][2]string{
		{"iptables &&", "iptables tcpdump &&"},
		{"FROM docker.io/library/debian", "FROM docker.io/library/alpine"},
		{"ln -s", "mv"},
	} {
		if _, err := follow(context.Background(), strings.Replace(string(text), change[0], change[1], 1), root, t.TempDir()); err == nil {
			t.Errorf("%q instead of %q is accepted", change[1], change[0])
		}
	}
}
