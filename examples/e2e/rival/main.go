//go:build linux

// Rival measures nodeproxy beside kube-proxy against a real API server.
//
//	rival [flags]            measure; JSON and a table go to files or standard output
//	rival --table FILE...    print the table of earlier runs' JSON
//	rival --graphs FOLDER --bench FILE FILE...    draw cold start and one change against the number of Services
//
// One run measures the proxies one after the other, each alone in its own network
// namespace, against the same kube-apiserver and etcd. Idle proxies and connections are measured
// with all proxies of one number of Services running. The Services have no selector; rival
// writes their EndpointSlices. All endpoint addresses are local to the proxy's namespace. One
// server answers at all of them and sends the address that the connection reached, so
// every measured connection consists of real packets and shows its endpoint. Both proxies
// get the same flags, and their defaults for everything else. kube-proxy is measured a second
// time with a minSyncPeriod of 1 ms, because its default of 1 s is most of a change's latency.
// In an outage of the API server all proxies run at the same time.
//
// It needs three binaries besides nodeproxy:
//
//	examples/e2e/apiserver/build /tmp/rival
//
// and root, or user namespaces. Without kube-proxy it measures nodeproxy alone.
// The types in report.go document the measurements and the JSON.
//
// The graphs show nodeproxy and kube-proxy in mode nftables from the JSON, and the library alone, from
// objects in memory to the kernel's commit, and its floor from the output of
//
//	go test -run '^$' -bench 'ColdStart|OneEndpointChanged' -benchtime 10x \
//		-sizes 100x10,1000x10,3000x10,10000x10,45000x10 ./nftables
//
// Later files replace runs of earlier ones. The same input gives the same bytes. go generate draws the
// graphs beside this file, for light and dark backgrounds, from testdata.
//
// kube-proxy is measured with at most 3,000 Services: its nftables mode can hold a kernel
// lock for minutes with more.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// What every measurement has: endpoints of each Service, changes per second of the burst, which the API
// server may limit, and the pause between a change that is in effect and the next one.
const (
	endpoints = 10
	rate      = 1000
	gap       = 50 * time.Millisecond
)

// extent is how much is measured: changes one by one, fewer for kube-proxy with its default minSyncPeriod,
// which takes a second for each; changes at a rate; starts of each proxy, of which the median counts, fewer if
// they take longer than 40 seconds; rounds of connections, 0.4 seconds for each proxy; outages.
type extent struct{ changes, kubeProxyChanges, rated, starts, rounds, outages int }

// options holds the values of the flags.
type options struct {
	extent
	apiserver, etcd  string // as the flags name them
	control          controlplane.Programs
	nodeproxy, rival string
	modes            []string
	services         []int // for both proxies
	alone            []int // for nodeproxy alone
	idle, outage     time.Duration
	outageOnly       bool
	changesOnly      bool
	jsonFile, mdFile string
	logs             string
	extra            []string
	// files hold the JSON of earlier runs. If there are any, nothing is measured.
	files         []string
	graphs, bench string
}

// maxKubeProxy is the largest number of Services that kube-proxy is measured with.
const maxKubeProxy = 3000

func main() {
	if os.Geteuid() != 0 {
		if inside, code, err := netlab.Reexec(); !inside {
			if err != nil {
				fmt.Fprintln(os.Stderr, "rival:", err)
				os.Exit(1)
			}
			os.Exit(code)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "rival:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if len(o.files) > 0 {
		reports, err := read(o.files)
		switch {
		case err != nil:
			return err
		case o.graphs != "":
			return draw(o.graphs, o.bench, reports)
		}
		return Markdown(out, reports...)
	}
	dir, err := os.MkdirTemp("", "rival")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := o.find(ctx, dir); err != nil {
		return err
	}
	report, err := measureAll(ctx, o, dir)
	if report == nil {
		return err
	}
	// After a failure the earlier measurements are still written.
	text, failed := json.MarshalIndent(report, "", "  ")
	err = errors.Join(err, failed)
	if o.jsonFile != "" {
		err = errors.Join(err, os.WriteFile(o.jsonFile, append(text, '\n'), 0o644))
	}
	if o.mdFile == "" {
		return errors.Join(err, Markdown(out, report))
	}
	f, failed := os.Create(o.mdFile)
	if failed != nil {
		return errors.Join(err, failed)
	}
	return errors.Join(err, Markdown(f, report), f.Close())
}

// read reads the JSON of earlier runs.
func read(files []string) (reports []*Report, err error) {
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		r := new(Report)
		if err := json.Unmarshal(text, r); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		reports = append(reports, r)
	}
	return reports, nil
}

func parse(args []string) (*options, error) {
	o := &options{extent: extent{changes: 200, kubeProxyChanges: 30, rated: 1000, starts: 5, rounds: 60, outages: 2}}
	f := flag.NewFlagSet("rival", flag.ExitOnError)
	table := f.Bool("table", false, "print the table of JSON files, which the arguments name, and measure nothing")
	f.StringVar(&o.graphs, "graphs", "", "draw the graphs of --bench and of JSON files, which the arguments name, in this folder, and measure nothing")
	f.StringVar(&o.bench, "bench", "", "file with the output of package nftables' benchmarks, for --graphs")
	f.StringVar(&o.apiserver, "kube-apiserver", "", "path of kube-apiserver; if empty, "+controlplane.APIServerEnv+" names it, or else it is the one in PATH")
	f.StringVar(&o.etcd, "etcd", "", "path of etcd; if empty, "+controlplane.EtcdEnv+" names it, or else it is the one in PATH")
	f.StringVar(&o.nodeproxy, "nodeproxy", "", "path of nodeproxy; built from source if empty")
	f.StringVar(&o.rival, "kube-proxy", os.Getenv("PROXIER_KUBE_PROXY"), "path of kube-proxy; if empty, the one in PATH; without any, only nodeproxy is measured")
	modes := f.String("modes", "nftables,iptables", "proxy modes")
	services := f.String("services", "100,1000,3000", "numbers of Services to measure both proxies with")
	alone := f.String("alone", "10000,45000", "numbers of Services to measure nodeproxy alone with")
	f.DurationVar(&o.idle, "idle", 10*time.Minute, "duration of the measurement of idle proxies; 0 to leave it out")
	f.DurationVar(&o.outage, "outage", 2*time.Minute, "duration of an outage of the API server; 0 to leave it out")
	f.BoolVar(&o.outageOnly, "outage-only", false, "measure outages and nothing else")
	f.BoolVar(&o.changesOnly, "changes-only", false, "measure starts and changes one by one, and nothing else")
	f.StringVar(&o.jsonFile, "json", "", "file for the JSON")
	f.StringVar(&o.mdFile, "markdown", "", "file for the table; standard output if empty")
	f.StringVar(&o.logs, "logs", "", "folder for the logs of all processes")
	extra := f.String("nodeproxy-flags", "", "further flags of nodeproxy, separated by spaces")
	short := f.Bool("short", false, "a short form: 100 Services, few changes, 5 idle seconds")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	o.files = f.Args()
	switch earlier := *table || o.graphs != ""; {
	case (o.graphs == "") != (o.bench == ""):
		return nil, errors.New("--graphs and --bench need each other")
	case earlier && f.NArg() == 0:
		return nil, errors.New("--table and --graphs need a file")
	case earlier:
		return o, nil
	case f.NArg() != 0:
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if *short {
		o.extent = extent{changes: 30, kubeProxyChanges: 5, rated: 300, starts: 2, rounds: 5, outages: 1}
		set := map[string]bool{}
		f.Visit(func(f *flag.Flag) { set[f.Name] = true })
		def := func(name string, apply func()) {
			if !set[name] {
				apply()
			}
		}
		def("services", func() { *services = "100" })
		def("alone", func() { *alone = "" })
		def("idle", func() { o.idle = 5 * time.Second })
		def("outage", func() { o.outage = time.Second })
	}
	if o.changesOnly {
		o.outage = 0
	}
	o.modes = list(*modes)
	o.extra = strings.Fields(*extra)
	var err error
	if o.services, err = numbers(*services); err != nil {
		return nil, err
	}
	if o.alone, err = numbers(*alone); err != nil {
		return nil, err
	}
	switch {
	case len(o.services)+len(o.alone) == 0:
		return nil, errors.New("--services and --alone are empty")
	case slices.ContainsFunc(append(o.services, o.alone...), func(n int) bool { return n < minServices || n > maxServices }):
		return nil, fmt.Errorf("numbers of Services must be from %d to %d", minServices, maxServices)
	}
	return o, nil
}

func list(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' })
}

func numbers(s string) (out []int, err error) {
	for _, f := range list(s) {
		n, err := strconv.Atoi(f)
		if err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	slices.Sort(out)
	return out, nil
}

// find finds the binaries. It builds nodeproxy if no flag names one.
func (o *options) find(ctx context.Context, dir string) error {
	var err error
	if o.control, err = controlplane.Find(o.apiserver, o.etcd); err != nil {
		return err
	}
	if o.rival == "" {
		o.rival, _ = exec.LookPath("kube-proxy")
	} else if _, err := exec.LookPath(o.rival); err != nil {
		return err
	}
	if o.nodeproxy != "" {
		_, err := exec.LookPath(o.nodeproxy)
		return err
	}
	o.nodeproxy = filepath.Join(dir, "nodeproxy")
	build := exec.CommandContext(ctx, "go", "build", "-ldflags=-s -w", "-o", o.nodeproxy, "github.com/go-proxier/proxier/examples/nodeproxy")
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", build, err, text)
	}
	return nil
}
