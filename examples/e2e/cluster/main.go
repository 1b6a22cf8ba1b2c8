// Cluster runs a Kubernetes cluster on one Linux machine and upstream's end-to-end
// tests in it, with nodeproxy or kube-proxy on the nodes. It needs root, some Debian
// packages, and Go; it needs no container registry and no virtual machines.
//
//	export GOWORK=off                  this folder is a module of its own
//	go run . check                     report what this machine lacks
//	go run . build                     build everything from source; takes long once
//	go run . up                        start a cluster (and build first)
//	go run . test MODE [FOCUS]         run the tests whose names match FOCUS
//	go run . test --proxy kube-proxy MODE [FOCUS]
//	go run . test --proxy daemonset MODE [FOCUS]
//	go run . table RUN...              print the results of runs side by side, as CSV
//	go run . summary RUN...            print a summary of runs, or of such CSV files
//	go run . proxy MODE                run the proxy alone, until interrupted
//	go run . in n1 nft list ruleset    run a command in a node, or in "control"
//	go run . down                      stop the cluster
//
// The cluster has real components: etcd, kube-apiserver, kube-controller-manager,
// kube-scheduler, kubelet, containerd, runc and CoreDNS. A node is a process with
// its own mount, network, PID, UTS and IPC namespaces. The nodes run in the PID
// namespace of the control plane, so killing the control plane's first process, even
// with SIGKILL, ends every process of the cluster. No namespace has a name, and nothing
// is mounted or configured outside of the cluster's namespaces, so the kernel removes
// everything with the last process, except files in the cache folder and empty control
// groups. "up" and "down" remove those.
//
// All files are in one folder (--dir): programs and images in a folder for each version
// of Kubernetes, results of tests in "runs", logs in "logs".
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

// The kernel signals a child with Pdeathsig when the thread that started it ends. The
// main thread lives as long as the process, so the main thread starts children.
func init() { runtime.LockOSThread() }

const usage = `usage: cluster COMMAND [flags]

  check                  report what this machine lacks
  build                  build Kubernetes and the images
  up                     start a cluster
  test MODE [FOCUS]      run upstream's tests whose names match the expression FOCUS
  table RUN...           print the results of the runs in these folders, and of earlier
                         tables (FILE.csv), as CSV
  summary RUN...         print a summary of the same as Markdown
  proxy MODE             run the proxy on all nodes until interrupted
  in NODE COMMAND...     run a command in a node (n1, n2, ...) or in "control"
  down                   stop the cluster

MODE is nftables or iptables, or ipvs if the kernel has it.

flags:
`

// options are the flags of all commands.
type options struct {
	dir, name     string
	nodes         int
	limit         time.Duration
	images        []string
	proxy         string
	procs         int
	timeout       time.Duration
	skip          string
	flakeAttempts int
}

func main() {
	// This program runs itself for the parts of a cluster. See supervise.go.
	if role, ok := strings.CutPrefix(filepath.Base(os.Args[0]), rolePrefix); ok {
		if err := roles[role](); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", role, err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command(ctx, os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "cluster: %v\n", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	var o options
	f := pflag.NewFlagSet("cluster", pflag.ContinueOnError)
	f.StringVar(&o.dir, "dir", "", "folder for all files; by default proxier/cluster in the user's cache folder")
	f.StringVar(&o.name, "name", "cluster", "name of the cluster, for more than one at a time")
	f.IntVar(&o.nodes, "nodes", 3, "up: number of nodes, 9 at most, spread over three zones")
	f.DurationVar(&o.limit, "for", 6*time.Hour, "up: stop the cluster after this time")
	f.StringSliceVar(&o.images, "images", nil, "up: archives of container images (by \"docker save\" or \"skopeo copy\"), which replace the built images of the same names")
	f.StringVar(&o.proxy, "proxy", "nodeproxy", "test, proxy: nodeproxy, kube-proxy, or "+daemonSet+" for nodeproxy in pods of deploy/base/daemonset.yaml")
	f.IntVar(&o.procs, "procs", 2*runtime.NumCPU(), "test: number of tests that run at a time")
	f.DurationVar(&o.timeout, "timeout", time.Hour, "test: stop after this time")
	f.StringVar(&o.skip, "skip", "", "test: leave out tests whose names match this expression")
	f.IntVar(&o.flakeAttempts, "flake-attempts", 1, "test: number of attempts before a failing test counts as failed")
	f.Usage = func() { fmt.Fprint(os.Stderr, usage+f.FlagUsages()) }
	parse := func(args []string, interspersed bool) ([]string, error) {
		f.SetInterspersed(interspersed)
		err := f.Parse(args)
		return f.Args(), err
	}
	args, err := parse(args, false)
	name := ""
	if err == nil && len(args) > 0 {
		name = args[0]
		args, err = parse(args[1:], name != "in") // the flags after "in NODE" are the command's
	}
	if err == pflag.ErrHelp {
		return nil
	}
	if err != nil {
		return err
	}
	if o.dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return fmt.Errorf("no default for --dir: %w", err)
		}
		o.dir = filepath.Join(cache, "proxier", "cluster")
	}
	if o.dir, err = filepath.Abs(o.dir); err != nil {
		return err
	}
	if o.nodes < 1 || o.nodes > maxNodes {
		return fmt.Errorf("--nodes is %d, must be 1 to %d", o.nodes, maxNodes)
	}
	if strings.Trim(o.name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || o.name == "" {
		return fmt.Errorf("--name is %q, must consist of a-z, 0-9 and -", o.name)
	}
	if name == "" {
		f.Usage()
		return errors.New("no command")
	}
	c, ok := map[string]struct {
		min, max int // numbers of arguments
		run      func() error
	}{
		"check": {0, 0, func() error {
			err := check()
			if err == nil {
				fmt.Println("this machine has all that a cluster needs")
			}
			return err
		}},
		"build": {0, 0, func() error {
			s, err := build(ctx, o)
			if err == nil {
				fmt.Printf("all programs and images of the cluster are in %s\n", s.Dir)
			}
			return err
		}},
		"up":      {0, 0, func() error { return up(ctx, o) }},
		"down":    {0, 0, func() error { return down(o) }},
		"test":    {1, 2, func() error { return test(ctx, o, args[0], append(args, `\[sig-network\]`)[1]) }},
		"proxy":   {1, 1, func() error { return runProxy(ctx, o, args[0]) }},
		"in":      {2, math.MaxInt, func() error { return runIn(ctx, o, args[0], args[1:]) }},
		"table":   {1, math.MaxInt, func() error { return table(os.Stdout, args) }},
		"summary": {1, math.MaxInt, func() error { return summary(os.Stdout, args) }},
	}[name]
	switch {
	case !ok:
		return fmt.Errorf("unknown command %q (see --help)", name)
	case len(args) < c.min || len(args) > c.max:
		return fmt.Errorf("%s: wrong number of arguments (see --help)", name)
	}
	return c.run()
}
