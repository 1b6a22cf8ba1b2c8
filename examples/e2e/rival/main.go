//go:build linux

// Rival measures nodeproxy beside kube-proxy against a real API server.
//
//	rival [flags]            measure; JSON goes to a file rival.json, a table to standard output
//	rival [flags] FILE...    print the table of earlier runs' JSON; later files replace runs of earlier ones
//
// One run measures the proxies one after the other, each alone in its own network
// namespace, against the same kube-apiserver and etcd. Connections are measured with all proxies of one
// number of Services running. The Services have no selector; rival
// writes their EndpointSlices. All endpoint addresses are local to the proxy's namespace. One
// server answers at all of them and sends the address that the connection reached, so
// every measured connection consists of real packets and shows its endpoint. Both proxies
// get the same flags, and their defaults for everything else. kube-proxy is measured a second
// time with a minSyncPeriod of 1 ms, because its default of 1 s is most of a change's latency.
// In an outage of the API server all proxies run at the same time.
//
// It needs root, or user namespaces, and three programs, which environment variables name:
//
//	examples/e2e/apiserver/build /tmp/rival
//	export PROXIER_KUBE_APISERVER=/tmp/rival/kube-apiserver PROXIER_ETCD=/tmp/rival/etcd
//	export PROXIER_KUBE_PROXY=/tmp/rival/kube-proxy
//
// Without kube-proxy it measures nodeproxy alone. It measures kube-proxy with at most 3,000 Services:
// kube-proxy's nftables mode can hold a kernel lock for minutes with more.
// The types in report.go document the measurements and the JSON.
//
// The graph (--graph) shows nodeproxy and kube-proxy in mode nftables from the JSON, and the library alone,
// from objects in memory to the kernel's commit, and its floor from the output of
//
//	go test -run '^$' -bench OneEndpointChanged ./nftables
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-proxier/proxier/examples/internal/process"
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
	nodeproxy, kubeProxy, dir string
	modes                     []string
	services                  []int
	outage                    time.Duration
	changesOnly               bool
}

// maxKubeProxy is the largest number of Services that kube-proxy is measured with.
const maxKubeProxy = 3000

//go:generate go run . --graph testdata/nftables.txt testdata/rival-45000.json testdata/rival-10000.json testdata/rival.json

func main() {
	process.Main("rival", func(ctx context.Context) error { return run(ctx, os.Args[1:], os.Stdout) })
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o := &options{extent: extent{changes: 200, kubeProxyChanges: 30, rated: 1000, starts: 5, rounds: 60, outages: 2}, kubeProxy: os.Getenv("PROXIER_KUBE_PROXY")}
	f := flag.NewFlagSet("rival", flag.ExitOnError)
	bench := f.String("graph", "", "file with the output of package nftables' benchmark: draw it with the JSON in one-change-light.svg and one-change-dark.svg")
	modes := f.String("modes", "nftables,iptables", "proxy modes")
	services := f.String("services", "100,1000,3000,10000,45000", fmt.Sprintf("numbers of Services; kube-proxy is measured with %d at most", maxKubeProxy))
	short := f.Bool("short", false, "few starts, changes and rounds")
	f.StringVar(&o.nodeproxy, "nodeproxy", "", "path of nodeproxy; built from source if empty")
	f.DurationVar(&o.outage, "outage", 2*time.Minute, "duration of an outage of the API server; 0 to leave it out")
	f.BoolVar(&o.changesOnly, "changes-only", false, "measure starts and changes one by one, and nothing else")
	f.StringVar(&o.dir, "dir", "", "empty folder for rival.json, logs and the state of etcd; a temporary one if not set")
	f.Parse(args) // exits after an error
	if f.NArg() > 0 {
		reports, err := read(f.Args())
		if err == nil && *bench != "" {
			err = draw(".", *bench, reports)
		}
		return errors.Join(err, Markdown(out, reports...))
	}
	if *short {
		o.extent = extent{changes: 30, kubeProxyChanges: 5, rated: 300, starts: 2, rounds: 5, outages: 1}
	}
	o.modes = strings.Split(*modes, ",")
	for _, text := range strings.Split(*services, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < minServices || n > maxServices {
			return fmt.Errorf("--services: %q is no number from %d to %d", text, minServices, maxServices)
		}
		o.services = append(o.services, n)
	}
	slices.Sort(o.services)
	var err error
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "rival"); err != nil {
			return err
		}
	}
	progress("files are in %s", o.dir)
	if o.nodeproxy, err = process.Nodeproxy(ctx, o.nodeproxy, o.dir); err != nil {
		return err
	}
	report, err := measureAll(ctx, o)
	if report == nil {
		return err
	}
	// After a failure the earlier measurements are still written.
	text, failed := json.MarshalIndent(report, "", "  ")
	return errors.Join(err, failed, os.WriteFile(filepath.Join(o.dir, "rival.json"), append(text, '\n'), 0o644), Markdown(out, report))
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
