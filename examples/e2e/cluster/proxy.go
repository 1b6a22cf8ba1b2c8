package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// daemonSet is the value of --proxy for nodeproxy in pods.
const daemonSet = "daemonset"

// localhostNodePorts holds the nodePortAddresses for the tests of NodePorts at loopback addresses,
// which mode nftables serves only if asked to.
const localhostNodePorts = "primary,localhost"

// withProxy runs the proxy in this mode on all nodes of a cluster while f runs. The proxy's
// rules remain until the next call.
func withProxy(ctx context.Context, o options, mode string, f func(context.Context, settings) error) error {
	if !slices.Contains([]string{"nftables", "iptables", "ipvs"}, mode) {
		return fmt.Errorf("unknown mode %q", mode)
	}
	s, err := o.running()
	if err != nil {
		return err
	}
	if mode == "ipvs" {
		// Nodes share this machine's kernel.
		if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
			return fmt.Errorf("cannot use mode ipvs: this machine's kernel has no IPVS: %w", err)
		}
	}
	if err := s.cleanUp(ctx); err != nil {
		return err
	}
	if o.proxy == daemonSet {
		return s.withDaemonSet(ctx, mode, f)
	}
	var command []string
	switch o.proxy {
	case "nodeproxy":
		if err := s.authorizeNodeproxy(ctx); err != nil {
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
	ctx, cancel := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	for n := 1; n <= s.Nodes; n++ {
		log, err := os.Create(s.log(nodeName(n) + "-" + o.proxy + ".log"))
		if err != nil {
			return err
		}
		defer log.Close()
		cmd := s.command(ctx, nodeName(n), append(slices.Clone(command), "--kubeconfig", s.inside().state(o.proxy+".conf"), "--hostname-override", nodeName(n),
			"--proxy-mode", mode, "--cluster-cidr", podRange, "--conntrack-max-per-core", "0",
			"--metrics-bind-address", "0.0.0.0:10249", "--healthz-bind-address", "0.0.0.0:10256")...)
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Start(); err != nil {
			return err
		}
		running.Go(func() {
			err := cmd.Wait()
			cancel(fmt.Errorf("%s ended on %s (see %s): %w", o.proxy, nodeName(n), log.Name(), err))
		})
	}
	err = s.waitHealthy(ctx)
	if err == nil {
		err = f(ctx, s)
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return err
}

// cleanUp removes the rules of both proxies and all tracked connections from all nodes at a time, with the
// nodeproxy of this tree.
func (s settings) cleanUp(ctx context.Context) error {
	if err := s.buildNodeproxy(ctx); err != nil {
		return err
	}
	cleaned := make([]error, s.Nodes)
	var all sync.WaitGroup
	for n := range s.Nodes {
		all.Go(func() {
			// nodeproxy's first: kube-proxy fails to remove chains that rules of nodeproxy refer to.
			cmd := s.command(ctx, nodeName(n+1), "sh", "-c", "nodeproxy run --cleanup && kube-proxy --cleanup && conntrack -F")
			if out, err := cmd.CombinedOutput(); err != nil {
				cleaned[n] = fmt.Errorf("cannot clean up %s: %w: %s", nodeName(n+1), err, out)
			}
		})
	}
	all.Wait()
	return errors.Join(cleaned...)
}

// kubectl runs kubectl in the cluster and returns its output.
func (s settings) kubectl(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	cmd := s.command(ctx, "control", append([]string{"kubectl"}, args...)...)
	cmd.Stdin = stdin
	return run(cmd)
}

// authorizeNodeproxy applies nodeproxy's manifest and writes a kubeconfig with a token of the
// manifest's ServiceAccount. nodeproxy has the rights of the manifest and no others.
func (s settings) authorizeNodeproxy(ctx context.Context) error {
	root, err := sourceRoot(ctx)
	if err != nil {
		return err
	}
	manifest, err := os.Open(filepath.Join(root, "examples", "nodeproxy", "deploy", "base", "rbac.yaml"))
	if err != nil {
		return err
	}
	defer manifest.Close()
	if _, err := s.kubectl(ctx, manifest, "apply", "-f", "-"); err != nil {
		return err
	}
	token, err := s.kubectl(ctx, nil, "create", "token", "nodeproxy", "--namespace", "kube-system", "--duration", "24h")
	if err != nil {
		return err
	}
	return s.writeKubeconfig("nodeproxy", "token: "+token)
}

// waitHealthy waits until the proxies of all nodes are healthy. It asks through the API server,
// because this process cannot reach the nodes.
func (s settings) waitHealthy(ctx context.Context) error {
	start := time.Now()
	for n := 1; n <= s.Nodes; {
		_, err := s.kubectl(ctx, nil, "get", "--raw", "/api/v1/nodes/http:"+nodeName(n)+":10256/proxy/healthz")
		switch {
		case err == nil:
			n++
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case time.Since(start) > startTimeout:
			return fmt.Errorf("the proxy of %s is not healthy after %s: %w", nodeName(n), startTimeout, err)
		default:
			time.Sleep(time.Second)
		}
	}
	return nil
}
