package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// daemonSetImage is the full name of the image in deploy/base/daemonset.yaml.
const daemonSetImage = "docker.io/library/nodeproxy:latest"

// withDaemonSet runs the DaemonSet of deploy/base/daemonset.yaml on all nodes of a cluster while f
// runs. Its image has what deploy/Containerfile makes. The proxy's rules remain.
func (s settings) withDaemonSet(ctx context.Context, pid int, control place, mode string, f func(context.Context, settings, place) error) error {
	root, err := sourceRoot(ctx)
	if err != nil {
		return err
	}
	deploy := filepath.Join(root, "examples", "nodeproxy", "deploy")
	tmp, err := os.MkdirTemp(s.Dir, ".daemonset-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := s.cleanUpAll(ctx, pid); err != nil { // builds nodeproxy
		return err
	}
	layer := filepath.Join(tmp, "layer")
	if err := copyFile(filepath.Join(layer, "usr/local/bin/nodeproxy"), filepath.Join(s.bin(), "nodeproxy"), 0o755); err != nil {
		return err
	}
	image := containerImage{[]string{daemonSetImage}, []string{s.rootfs(), layer}, []string{"/usr/local/bin/nodeproxy"}, []string{"run"}}
	archive := filepath.Join(tmp, "nodeproxy.tar")
	if err := writeArchive(ctx, archive, tmp, []containerImage{image}); err != nil {
		return err
	}
	for n := 1; n <= s.Nodes; n++ {
		node, err := s.place(pid, nodeName(n))
		if err != nil {
			return err
		}
		// The archive's path inside of the cluster.
		file := filepath.Join(cacheInside, filepath.Base(tmp), filepath.Base(archive))
		cmd := exec.Command("/usr/bin/env", "ctr", "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", file)
		cmd.Env = s.inside().environment()
		if err := node.run(ctx, cmd); err != nil {
			return fmt.Errorf("cannot import the image on %s: %w", node.name, err)
		}
	}
	rights, err := os.ReadFile(filepath.Join(deploy, "base", "rbac.yaml"))
	if err != nil {
		return err
	}
	text, err := readBase(filepath.Join(deploy, "base"))
	if err != nil {
		return err
	}
	manifest, err := adapt(text, mode, has(unix.CAP_SYS_RESOURCE))
	if err != nil {
		return fmt.Errorf("%s/base: %w", deploy, err)
	}
	for _, m := range []string{string(rights), manifest} {
		if _, err := s.kubectl(ctx, control, strings.NewReader(m), "apply", "-f", "-"); err != nil {
			return err
		}
	}
	// Also after an interruption.
	defer s.kubectl(context.WithoutCancel(ctx), control, strings.NewReader(manifest), "delete", "--ignore-not-found", "--timeout=1m", "-f", "-")
	out, err := s.kubectl(ctx, control, nil, "rollout", "status", "--namespace=kube-system", "--timeout="+startTimeout.String(), "daemonset/nodeproxy")
	if err != nil {
		pods, _ := s.kubectl(ctx, control, nil, "describe", "pods", "--namespace=kube-system", "--selector=app.kubernetes.io/name=nodeproxy")
		return fmt.Errorf("%w\n%s", err, pods)
	}
	fmt.Println(out)
	for n := 1; n <= s.Nodes; n++ {
		if err := s.waitHealthy(ctx, control, nodeName(n)); err != nil {
			return err
		}
	}
	return f(ctx, s, control)
}

// has reports whether this process can give a capability to others.
func has(capability uintptr) bool {
	n, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, capability, 0, 0, 0)
	return err == nil && n == 1
}

// readBase returns the ConfigMap that kustomize generates from config.yaml, but without a hash in its
// name, and daemonset.yaml.
func readBase(dir string) (string, error) {
	config, err := os.ReadFile(filepath.Join(dir, "config.yaml"))
	if err != nil {
		return "", err
	}
	set, err := os.ReadFile(filepath.Join(dir, "daemonset.yaml"))
	if err != nil {
		return "", err
	}
	text := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: nodeproxy, namespace: kube-system}\ndata:\n  config.yaml: |\n"
	for line := range strings.Lines(string(config)) {
		text += "    " + line
	}
	return text + "---\n" + string(set), nil
}

// adapt makes the changes to config.yaml and daemonset.yaml that the latter's comments ask for in this cluster, whose
// nodes are containers, and has mode nftables serve NodePorts at loopback addresses. If the
// machine does not have CAP_SYS_RESOURCE, no container can have it. It returns an error if the
// file lacks what is to be changed.
func adapt(manifest, mode string, sysResource bool) (string, error) {
	config := "clusterCIDR: " + podRange + "\n    conntrack: {maxPerCore: 0}"
	if mode == "nftables" {
		config += "\n    nodePortAddresses: [" + localhostNodePorts + "]"
	}
	changes := [][2]string{
		{"api.cluster.example", controlIP},
		{"clusterCIDR: 10.244.0.0/16", config},
		{"    mode: nftables\n", "    mode: " + mode + "\n"},
	}
	if !sysResource {
		changes = append(changes, [2]string{", SYS_RESOURCE]", "]"})
	}
	for _, change := range changes {
		if strings.Count(manifest, change[0]) != 1 {
			return "", fmt.Errorf("%q is not there exactly once", change[0])
		}
		manifest = strings.Replace(manifest, change[0], change[1], 1)
	}
	return manifest, nil
}

// sourceRoot returns the root of the tree that holds this module.
func sourceRoot(ctx context.Context) (string, error) {
	dir, err := output(ctx, "go", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return "", fmt.Errorf("cannot find nodeproxy's sources (run this in folder e2e/cluster): %w", err)
	}
	return filepath.Join(dir, "..", "..", ".."), nil
}
