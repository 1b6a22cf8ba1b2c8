package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// daemonSet is the value of --proxy for nodeproxy in pods.
const daemonSet = "daemonset"

// localhostNodePorts holds the nodePortAddresses for the tests of NodePorts at loopback addresses,
// which mode nftables serves only if asked to.
const localhostNodePorts = "primary,localhost"

func runProxy(ctx context.Context, o options, mode string) error {
	return withProxy(ctx, o, mode, func(ctx context.Context, _ settings, control place) error {
		fmt.Printf("%s runs in mode %s until interrupted\n", o.proxy, mode)
		<-ctx.Done()
		return nil
	})
}

// withProxy runs the proxy in this mode on all nodes of a cluster while f runs. The proxy's
// rules remain until the next call.
func withProxy(ctx context.Context, o options, mode string, f func(context.Context, settings, place) error) error {
	if !slices.Contains([]string{"nftables", "iptables", "ipvs"}, mode) {
		return fmt.Errorf("unknown mode %q", mode)
	}
	s, pid, err := o.running()
	if err != nil {
		return err
	}
	if mode == "ipvs" {
		// Nodes share this machine's kernel.
		if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
			return fmt.Errorf("cannot use mode ipvs: this machine's kernel has no IPVS: %w", err)
		}
	}
	control, err := s.place(pid, "control")
	if err != nil {
		return err
	}
	if o.proxy == daemonSet {
		return s.withDaemonSet(ctx, pid, control, mode, f)
	}
	inside := s.inside()
	var command []string
	switch o.proxy {
	case "nodeproxy":
		if err := s.authorizeNodeproxy(ctx, control); err != nil {
			return err
		}
		command = []string{inside.bin("nodeproxy"), "run"}
	case "kube-proxy":
		command = []string{inside.bin("kube-proxy")}
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
	defer cancel(nil)
	var running []*process
	defer func() {
		for _, p := range running {
			p.cmd.Process.Signal(syscall.SIGTERM)
		}
		for _, p := range running {
			select {
			case <-p.done:
			case <-time.After(10 * time.Second):
				p.cmd.Process.Kill()
				<-p.done
			}
		}
	}()
	if err := s.cleanUpAll(ctx, pid); err != nil {
		return err
	}
	for n := 1; n <= s.Nodes; n++ {
		node, err := s.place(pid, nodeName(n))
		if err != nil {
			return err
		}
		args := append(slices.Clone(command), "--kubeconfig", inside.state(o.proxy+".conf"), "--hostname-override", nodeName(n),
			"--proxy-mode", mode, "--cluster-cidr", podRange, "--conntrack-max-per-core", "0",
			"--metrics-bind-address", "0.0.0.0:10249", "--healthz-bind-address", "0.0.0.0:10256")
		log, err := os.Create(s.log(nodeName(n) + "-" + o.proxy + ".log"))
		if err != nil {
			return err
		}
		defer log.Close()
		p, err := node.start(&exec.Cmd{Path: args[0], Args: args, Env: inside.environment(), Stdout: log, Stderr: log})
		if err != nil {
			return err
		}
		running = append(running, p)
		go func() {
			<-p.done
			cancel(fmt.Errorf("%s ended on %s (see %s): %w", o.proxy, nodeName(n), log.Name(), p.err))
		}()
	}
	for n := 1; n <= s.Nodes; n++ {
		if err := s.waitHealthy(ctx, control, nodeName(n)); err != nil {
			return err
		}
	}
	err = f(ctx, s, control)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return err
}

// cleanUpAll cleans up all nodes at a time, with the nodeproxy of this tree.
func (s settings) cleanUpAll(ctx context.Context, pid int) error {
	if err := s.buildNodeproxy(ctx); err != nil {
		return err
	}
	cleaned := make([]error, s.Nodes)
	var all sync.WaitGroup
	for n := range s.Nodes {
		all.Go(func() {
			node, err := s.place(pid, nodeName(n+1))
			if err == nil {
				err = s.cleanUp(ctx, node)
			}
			cleaned[n] = err
		})
	}
	all.Wait()
	return errors.Join(cleaned...)
}

// cleanUp removes the rules of both proxies and all tracked connections from a node.
func (s settings) cleanUp(ctx context.Context, node place) error {
	bin := s.inside().bin
	// nodeproxy's first: kube-proxy fails to remove chains that rules of nodeproxy refer to.
	for _, c := range [][]string{{bin("nodeproxy"), "run", "--cleanup"}, {bin("kube-proxy"), "--cleanup"}, {"/usr/bin/env", "conntrack", "-F"}} {
		var out bytes.Buffer
		if err := node.run(ctx, &exec.Cmd{Path: c[0], Args: c, Env: s.inside().environment(), Stdout: &out, Stderr: &out}); err != nil {
			return fmt.Errorf("cannot clean up %s: %s: %w: %s", node.name, strings.Join(c, " "), err, out.Bytes())
		}
	}
	return nil
}

// kubectl runs kubectl in the cluster and returns its output.
func (s settings) kubectl(ctx context.Context, control place, stdin io.Reader, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	err := control.run(ctx, &exec.Cmd{
		Path: s.inside().bin("kubectl"), Args: append([]string{"kubectl"}, args...),
		Env: s.inside().environment(), Stdin: stdin, Stdout: &stdout, Stderr: &stderr,
	})
	if err != nil {
		err = fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSpace(stdout.String()), err
}

// authorizeNodeproxy applies nodeproxy's manifest and writes a kubeconfig with a token of the
// manifest's ServiceAccount. nodeproxy has the rights of the manifest and no others.
func (s settings) authorizeNodeproxy(ctx context.Context, control place) error {
	root, err := sourceRoot(ctx)
	if err != nil {
		return err
	}
	manifest, err := os.Open(filepath.Join(root, "examples", "nodeproxy", "deploy", "base", "rbac.yaml"))
	if err != nil {
		return err
	}
	defer manifest.Close()
	if _, err := s.kubectl(ctx, control, manifest, "apply", "-f", "-"); err != nil {
		return err
	}
	token, err := s.kubectl(ctx, control, nil, "create", "token", "nodeproxy", "--namespace", "kube-system", "--duration", "24h")
	if err != nil {
		return err
	}
	return s.writeKubeconfig("nodeproxy", "token: "+token)
}

// waitHealthy waits until the proxy of a node is healthy. It asks through the API server,
// because this process cannot reach the nodes.
func (s settings) waitHealthy(ctx context.Context, control place, node string) error {
	start := time.Now()
	for {
		_, err := s.kubectl(ctx, control, nil, "get", "--raw", "/api/v1/nodes/http:"+node+":10256/proxy/healthz")
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Since(start) > startTimeout {
			return fmt.Errorf("the proxy of %s is not healthy after %s: %w", node, startTimeout, err)
		}
		time.Sleep(time.Second)
	}
}
