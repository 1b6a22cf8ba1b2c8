package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// daemonSetImage is the full name of the image in deploy/base/daemonset.yaml.
const daemonSetImage = "docker.io/library/nodeproxy:latest"

// withDaemonSet runs the DaemonSet of deploy/base/daemonset.yaml on all nodes of a cluster while f
// runs. Its image has what deploy/Containerfile makes. The proxy's rules remain.
func (s settings) withDaemonSet(ctx context.Context, mode string, f func(context.Context, settings) error) error {
	root, err := sourceRoot(ctx)
	if err != nil {
		return err
	}
	base := filepath.Join(root, "examples", "nodeproxy", "deploy", "base")
	if err := install(ctx, filepath.Join(s.rootfs(), "usr/local/bin/nodeproxy"), s.bin("nodeproxy"), "755"); err != nil {
		return err
	}
	const archive = "nodeproxy.tar"
	if err := s.writeArchive(ctx, archive, []containerImage{{[]string{daemonSetImage}, []string{"/usr/local/bin/nodeproxy"}, []string{"run"}}}); err != nil {
		return err
	}
	for n := 1; n <= s.Nodes; n++ {
		if _, err := run(s.command(ctx, nodeName(n), "ctr", "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", s.inside().bin(archive))); err != nil {
			return fmt.Errorf("cannot import the image on %s: %w", nodeName(n), err)
		}
	}
	rights, err := os.ReadFile(filepath.Join(base, "rbac.yaml"))
	if err != nil {
		return err
	}
	text, err := readBase(base)
	if err != nil {
		return err
	}
	manifest, err := adapt(text, mode, has(unix.CAP_SYS_RESOURCE))
	if err != nil {
		return fmt.Errorf("%s: %w", base, err)
	}
	if _, err := s.kubectl(ctx, strings.NewReader(string(rights)+"---\n"+manifest), "apply", "-f", "-"); err != nil {
		return err
	}
	// Also after an interruption.
	defer s.kubectl(context.WithoutCancel(ctx), strings.NewReader(manifest), "delete", "--ignore-not-found", "--timeout=1m", "-f", "-")
	if _, err := s.kubectl(ctx, nil, "rollout", "status", "--namespace=kube-system", "--timeout="+startTimeout.String(), "daemonset/nodeproxy"); err != nil {
		pods, _ := s.kubectl(ctx, nil, "describe", "pods", "--namespace=kube-system", "--selector=app.kubernetes.io/name=nodeproxy")
		return fmt.Errorf("%w\n%s", err, pods)
	}
	if err := s.waitHealthy(ctx); err != nil {
		return err
	}
	return f(ctx, s)
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
