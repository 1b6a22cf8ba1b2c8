//go:build linux

package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/perf/benchfmt"
)

//go:generate go run . --graphs . --bench testdata/nftables.txt testdata/rival-45000.json testdata/rival-10000.json testdata/rival.json

// figures holds what the graphs show: cold starts and changes, by line.
type figures struct {
	start, change [lines]points
	period        time.Duration // the minSyncPeriod of lineShortPeriod, or 0
	version       string        // of kube-proxy, such as "1.37.2"; empty if it was not measured
}

// The lines of a graph.
const (
	lineKubeProxy   = iota // with its default minSyncPeriod
	lineShortPeriod        // kube-proxy with another
	lineNodeproxy
	lineLibrary
	lineFloor
	lines
)

// points holds times in order of the numbers of Services.
type points []point

type point struct {
	services int
	seconds  float64
}

// add inserts a point, or replaces the point with the same number of Services.
func (l *points) add(services int, seconds float64) {
	i, found := slices.BinarySearchFunc(*l, services, func(p point, n int) int { return cmp.Compare(p.services, n) })
	if !found {
		*l = slices.Insert(*l, i, point{services: services})
	}
	(*l)[i].seconds = seconds
}

// draw writes the graphs of a benchmark's output and of reports to a folder.
func draw(folder, bench string, reports []*Report) error {
	f, err := os.Open(bench)
	if err != nil {
		return err
	}
	defer f.Close()
	var d figures
	if err := d.addBench(f, bench); err != nil {
		return err
	}
	for _, r := range reports {
		d.addReport(r)
	}
	for _, g := range d.graphs() {
		if len(g.lines) == 0 {
			return fmt.Errorf("no figures for %q in the input", g.title)
		}
		for _, t := range themes {
			if err := os.WriteFile(filepath.Join(folder, g.file+"-"+t.name+".svg"), g.svg(t), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// addBench adds the output of go test -bench. If a benchmark ran several times, the median
// counts.
func (d *figures) addBench(r io.Reader, file string) error {
	type key struct {
		to       *points
		services int
	}
	all := map[key][]float64{}
	results := benchfmt.NewReader(r, file)
	for results.Scan() {
		result, ok := results.Result().(*benchfmt.Result)
		if !ok {
			if bad, ok := results.Result().(*benchfmt.SyntaxError); ok {
				return bad
			}
			continue
		}
		base, parts := result.Name.Parts()
		to, ok := map[string]*[lines]points{"ColdStart": &d.start, "OneEndpointChanged": &d.change}[string(base)]
		if !ok {
			continue
		}
		size := map[string]int{}
		for _, p := range parts {
			name, value, _ := strings.Cut(strings.TrimPrefix(string(p), "/"), "=")
			size[name], _ = strconv.Atoi(value)
		}
		if size["endpoints"] != endpoints {
			continue
		}
		for unit, to := range map[string]*points{"sec/op": &to[lineLibrary], "floor-sec/op": &to[lineFloor]} {
			if v, ok := result.Value(unit); ok {
				k := key{to, size["services"]}
				all[k] = append(all[k], v)
			}
		}
	}
	if err := results.Err(); err != nil {
		return err
	}
	for k, list := range all {
		slices.Sort(list)
		k.to.add(k.services, list[len(list)/2])
	}
	return nil
}

// addReport adds the runs in mode nftables. They replace earlier ones with as many Services. A failed run counts with
// its measurements before the failure.
func (d *figures) addReport(report *Report) {
	for _, run := range report.Runs {
		if run.Mode != "nftables" || run.Endpoints != endpoints {
			continue
		}
		line := lineNodeproxy
		if run.Proxy == kubeProxy {
			line = lineKubeProxy
			d.version = strings.TrimPrefix(run.Version, "Kubernetes v")
		}
		if run.MinSyncPeriod != "" {
			line = lineShortPeriod
			d.period, _ = time.ParseDuration(run.MinSyncPeriod)
		} else if run.Start.Seconds > 0 { // the period has no part in a start
			d.start[line].add(run.Services, run.Start.Seconds)
		}
		if run.Change.P50ms > 0 {
			d.change[line].add(run.Services, run.Change.P50ms/1000)
		}
	}
}
