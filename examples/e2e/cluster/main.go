// Cluster runs a Kubernetes cluster on one Linux machine and upstream's end-to-end
// tests in it, with nodeproxy or kube-proxy on the nodes. It needs root, some Debian
// packages, and Go; it needs no container registry and no virtual machines.
//
//	export GOWORK=off         this folder is a module of its own, in which the commands run
//	go run . --help           list the commands
//
// The cluster has real components: etcd, kube-apiserver, kube-controller-manager,
// kube-scheduler, kubelet, containerd, runc and CoreDNS. A node is a process with
// its own mount, network, PID, UTS and IPC namespaces. The nodes run in the PID
// namespace of the control plane, so killing the control plane's first process, even
// with SIGKILL, ends every process of the cluster. No namespace has a name, and nothing
// is mounted or configured outside of the cluster's namespaces, so the kernel removes
// everything with the last process, except files in the cache folder and empty control
// groups. "up" removes those, when it begins and when it ends.
//
// All files are in one folder (--dir): programs and images in a folder for each version
// of Kubernetes, results of tests in "runs", logs in "logs".
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

// The kernel signals a child with Pdeathsig when the thread that started it ends. The
// main thread lives as long as the process, so the main thread starts children.
func init() { runtime.LockOSThread() }

const usage = `usage: cluster COMMAND [flags]

  build                  build Kubernetes and the images; takes long once
  up                     run a cluster until interrupted (and build first)
  test MODE [FOCUS]      run upstream's tests whose names match the expression FOCUS
  table FILE.csv...      merge the results of runs and of earlier tables, as CSV
  summary FILE.csv...    print a summary of such results as Markdown
  proxy MODE             run the proxy on all nodes until interrupted
  in NODE COMMAND...     run a command in a node (n1, n2, ...) or in "control"

MODE is nftables or iptables, or ipvs if the kernel has it.

flags:
`

// options are the flags of all commands.
type options struct {
	dir, proxy   string
	nodes, procs int
	timeout      time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	var o options
	f := pflag.NewFlagSet("cluster", pflag.ContinueOnError)
	f.SetInterspersed(len(args) == 0 || args[0] != "in") // the flags after "in NODE" are the command's
	f.StringVar(&o.dir, "dir", filepath.Join(cache, "proxier", "cluster"), "absolute path of the folder for all files, not below /run, /tmp or /var")
	f.IntVar(&o.nodes, "nodes", 3, "up: number of nodes, 9 at most, spread over three zones")
	f.StringVar(&o.proxy, "proxy", "nodeproxy", "test, proxy: nodeproxy, kube-proxy, or "+daemonSet+" for nodeproxy in pods of deploy/base")
	f.IntVar(&o.procs, "procs", 2*runtime.NumCPU(), "test: number of tests that run at a time")
	f.DurationVar(&o.timeout, "timeout", time.Hour, "test: stop after this time")
	f.Usage = func() { fmt.Fprint(os.Stderr, usage+f.FlagUsages()) }
	if err := f.Parse(args); err != nil || f.NArg() == 0 {
		f.Usage()
		return err
	}
	args = f.Args()
	switch name, n := args[0], len(args)-1; {
	case o.nodes < 1 || o.nodes > maxNodes:
		return fmt.Errorf("--nodes is %d, must be 1 to %d", o.nodes, maxNodes)
	case name == "build" && n == 0:
		_, err = build(ctx, o)
	case name == "up" && n == 0:
		err = up(ctx, o)
	case name == "control" && n == 1: // up runs this
		err = control(args[1])
	case name == "node" && n == 2: // control runs this
		err = node(args[1], args[2])
	case name == "test" && (n == 1 || n == 2):
		err = test(ctx, o, args[1], append(args, `\[sig-network\]`)[2])
	case name == "proxy" && n == 1:
		err = withProxy(ctx, o, args[1], func(ctx context.Context, _ settings) error {
			fmt.Printf("%s runs in mode %s until interrupted\n", o.proxy, args[1])
			<-ctx.Done()
			return nil
		})
	case name == "in" && n >= 2:
		var s settings
		if s, err = running(o.dir); err == nil {
			cmd := s.command(ctx, args[1], args[2:]...)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
			err = cmd.Run()
		}
	case (name == "table" || name == "summary") && n >= 1:
		var r results
		if r, err = readResults(args[1:]); err == nil && name == "table" {
			err = r.write(os.Stdout)
		} else if err == nil {
			err = r.summary(os.Stdout)
		}
	default:
		f.Usage()
		err = errors.New("unknown command, or wrong number of arguments")
	}
	return err
}
