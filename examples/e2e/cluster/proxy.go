package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// daemonSet is the value of --proxy for nodeproxy in pods.
const daemonSet = "daemonset"

// localhostNodePorts holds the nodePortAddresses for the tests of NodePorts at loopback addresses,
// which mode nftables serves only if asked to.
const localhostNodePorts = "primary,localhost"

// withProxy runs the proxy in this mode on all nodes of a cluster while f runs. The proxy's
// rules remain until the next call.
func withProxy(ctx context.Context, o options, mode string, f func(context.Context, settings) error) error {
	s, err := running(o.dir)
	if err != nil {
		return err
	}
	if err := s.buildNodeproxy(ctx); err != nil {
		return err
	}
	// nodeproxy's rules first: kube-proxy fails to remove chains that rules of nodeproxy refer to.
	if err := s.onNodes(ctx, "sh", "-c", "nodeproxy run --cleanup && kube-proxy --cleanup && conntrack -F"); err != nil {
		return err
	}
	var command []string
	switch o.proxy {
	case daemonSet:
		return s.withDaemonSet(ctx, mode, f)
	case "nodeproxy":
		rights, err := os.ReadFile(filepath.Join(nodeproxySource, "deploy/base/rbac.yaml"))
		if err != nil {
			return err
		}
		if _, err := s.kubectl(ctx, string(rights), "apply", "-f", "-"); err != nil {
			return err
		}
		command = []string{"nodeproxy", "run"}
	case "kube-proxy":
		command = []string{"kube-proxy"}
	default:
		return fmt.Errorf("unknown proxy %q, must be nodeproxy, kube-proxy or %s", o.proxy, daemonSet)
	}
	if mode == "nftables" {
		command = append(command, "--nodeport-addresses", localhostNodePorts)
		if o.proxy == "kube-proxy" {
			command = append(command, "--feature-gates", "KubeProxyNFTablesLocalhostNodePorts=true")
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for n := 1; n <= s.Nodes; n++ {
		log, err := os.Create(s.log(nodeName(n) + "-" + o.proxy + ".log"))
		if err != nil {
			return err
		}
		defer log.Close()
		cmd := s.command(ctx, nodeName(n), append(slices.Clone(command), "--kubeconfig", s.state(o.proxy+".conf"), "--hostname-override", nodeName(n),
			"--proxy-mode", mode, "--cluster-cidr", podRange, "--conntrack-max-per-core", "0",
			"--metrics-bind-address", "0.0.0.0:10249", "--healthz-bind-address", "0.0.0.0:10256")...)
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Start(); err != nil {
			return err
		}
		g.Go(func() error {
			if err := cmd.Wait(); ctx.Err() == nil {
				return fmt.Errorf("%s ended on %s (see %s): %w", o.proxy, nodeName(n), log.Name(), err)
			}
			return nil
		})
	}
	if err = s.waitHealthy(ctx); err == nil {
		err = f(ctx, s)
	}
	stop()
	if ended := g.Wait(); ended != nil {
		return ended
	}
	return err
}

// withDaemonSet runs the DaemonSet of deploy/base on all nodes of a cluster while f
// runs. Its image has what deploy/Containerfile makes. The proxy's rules remain.
func (s settings) withDaemonSet(ctx context.Context, mode string, f func(context.Context, settings) error) error {
	base, err := kustomize(filepath.Join(nodeproxySource, "deploy/base"))
	if err != nil {
		return err
	}
	manifest, name, err := adapt(base, mode, has(unix.CAP_SYS_RESOURCE))
	if err != nil {
		return err
	}
	if _, err := output(ctx, "cp", s.bin("nodeproxy"), filepath.Join(s.rootfs(), "usr/local/bin")); err != nil {
		return err
	}
	const archive = "nodeproxy.tar"
	if err := s.writeArchive(ctx, archive, []containerImage{{[]string{name}, []string{"/usr/local/bin/nodeproxy"}, []string{"run"}}}); err != nil {
		return err
	}
	if err := s.onNodes(ctx, "ctr", "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", s.bin(archive)); err != nil {
		return err
	}
	if _, err := s.kubectl(ctx, manifest, "apply", "-f", "-"); err != nil {
		return err
	}
	// Also after an interruption.
	defer s.kubectl(context.WithoutCancel(ctx), manifest, "delete", "--ignore-not-found", "--timeout=1m", "-f", "-")
	if _, err := s.kubectl(ctx, "", "rollout", "status", "--namespace=kube-system", "--timeout="+startTimeout.String(), "daemonset/nodeproxy"); err != nil {
		pods, _ := s.kubectl(ctx, "", "describe", "pods", "--namespace=kube-system", "--selector=app.kubernetes.io/name=nodeproxy")
		return fmt.Errorf("%w\n%s", err, pods)
	}
	if err := s.waitHealthy(ctx); err != nil {
		return err
	}
	return f(ctx, s)
}

// kustomize returns what "kubectl kustomize" prints.
func kustomize(dir string) (string, error) {
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return "", err
	}
	text, err := m.AsYaml()
	return string(text), err
}

// has reports whether this process can give a capability to others.
func has(capability uintptr) bool {
	n, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, capability, 0, 0, 0)
	return err == nil && n == 1
}

// adapt makes the changes to deploy/base that its comments ask for in this cluster, whose
// nodes are containers, and has mode nftables serve NodePorts at loopback addresses. If the
// machine does not have CAP_SYS_RESOURCE, no container can have it. It returns the manifest and the image's
// name, or an error if the manifest lacks what is to be changed.
func adapt(manifest, mode string, sysResource bool) (out, image string, err error) {
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
		changes = append(changes, [2]string{"            - SYS_RESOURCE\n", ""})
	}
	for _, change := range changes {
		if strings.Count(manifest, change[0]) != 1 {
			return "", "", fmt.Errorf("%q is not in the manifest exactly once", change[0])
		}
		manifest = strings.Replace(manifest, change[0], change[1], 1)
	}
	_, rest, found := strings.Cut(manifest, " image: ")
	if !found {
		return "", "", errors.New("no image in the manifest")
	}
	image, _, _ = strings.Cut(rest, "\n")
	return manifest, image, nil
}

// onNodes runs a command on all nodes at a time.
func (s settings) onNodes(ctx context.Context, command ...string) error {
	var all errgroup.Group
	for n := 1; n <= s.Nodes; n++ {
		all.Go(func() error {
			_, err := run(s.command(ctx, nodeName(n), command...))
			return err
		})
	}
	return all.Wait()
}

// kubectl runs kubectl in the cluster and returns its output.
func (s settings) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := s.command(ctx, "control", append([]string{"kubectl"}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	return run(cmd)
}

// waitHealthy waits until the proxies of all nodes are healthy. It asks through the API server,
// because this process cannot reach the nodes.
func (s settings) waitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for n := 1; n <= s.Nodes; {
		_, err := s.kubectl(ctx, "", "get", "--raw", "/api/v1/nodes/http:"+nodeName(n)+":10256/proxy/healthz")
		switch {
		case err == nil:
			n++
		case ctx.Err() != nil:
			return fmt.Errorf("the proxy of %s is not healthy: %w", nodeName(n), err)
		default:
			time.Sleep(time.Second)
		}
	}
	return nil
}
