package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/perf/benchfmt"
)

// endpoints is the number of endpoints of each Service in the graphs.
const endpoints = 10

// data holds the figures of cold starts and of changes, by kind.
type data struct {
	start, change [kinds]points
	period        time.Duration // the minSyncPeriod of kubeProxyShort, or 0
	version       string        // of kube-proxy, such as "1.37.2"; empty if it was not measured
}

// kind is the subject of a line in a graph.
type kind int

const (
	kubeProxy      kind = iota // with its default minSyncPeriod
	kubeProxyShort             // with another
	nodeproxy
	library
	floor
	kinds
)

// point is a time in seconds with a number of Services.
type point struct{ services, seconds float64 }

type points []point

// read opens a file and calls add with it.
func read(file string, add func(io.Reader, string) error) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	return add(f, file)
}

// addBench adds the output of go test -bench. If a benchmark ran several times, the median
// counts.
func (d *data) addBench(r io.Reader, file string) error {
	type key struct {
		to       *points
		services float64
	}
	all := map[key][]float64{}
	lines := benchfmt.NewReader(r, file)
	for lines.Scan() {
		result, ok := lines.Result().(*benchfmt.Result)
		if !ok {
			if bad, ok := lines.Result().(*benchfmt.SyntaxError); ok {
				return bad
			}
			continue
		}
		base, parts := result.Name.Parts()
		var took, bare *points
		switch string(base) {
		case "ColdStart":
			took, bare = &d.start[library], &d.start[floor]
		case "OneEndpointChanged":
			took, bare = &d.change[library], &d.change[floor]
		default:
			continue
		}
		services, each := 0.0, 0.0
		for _, p := range parts {
			if name, value, ok := strings.Cut(strings.TrimPrefix(string(p), "/"), "="); ok {
				n, err := strconv.ParseFloat(value, 64)
				switch {
				case err != nil || n <= 0:
					return fmt.Errorf("%s: %s: bad number", file, result.Name)
				case name == "services":
					services = n
				case name == "endpoints":
					each = n
				}
			}
		}
		if each != endpoints {
			continue
		}
		for unit, to := range map[string]*points{"sec/op": took, "floor-sec/op": bare} {
			v, ok := result.Value(unit)
			if !ok || v <= 0 || services == 0 {
				return fmt.Errorf("%s: %s: no %s", file, result.Name, unit)
			}
			k := key{to, services}
			all[k] = append(all[k], v)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("%s: no ColdStart or OneEndpointChanged with %d endpoints", file, endpoints)
	}
	for k, list := range all {
		slices.Sort(list)
		k.to.add(k.services, list[len(list)/2])
	}
	return nil
}

// addRival adds the JSON of rival.
func (d *data) addRival(r io.Reader, file string) error {
	var report struct {
		Runs []struct {
			Proxy, Version      string
			Mode, MinSyncPeriod string
			Services, Endpoints int
			Start               struct{ Seconds float64 }
			Change              struct {
				P50Ms float64
			}
			Failed string
		}
	}
	if err := json.NewDecoder(r).Decode(&report); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	n := 0
	for _, run := range report.Runs {
		k, known := map[string]kind{"kube-proxy": kubeProxy, "nodeproxy": nodeproxy}[run.Proxy]
		switch {
		case !known:
			return fmt.Errorf("%s: unknown proxy %q", file, run.Proxy)
		case run.Mode != "nftables" || run.Endpoints != endpoints:
			continue
		case run.Services <= 0:
			return fmt.Errorf("%s: %s: %d Services", file, run.Proxy, run.Services)
		}
		if k == kubeProxy {
			version, ok := strings.CutPrefix(run.Version, "Kubernetes v")
			switch {
			case !ok:
				return fmt.Errorf("%s: kube-proxy has version %q", file, run.Version)
			case d.version != "" && d.version != version:
				return fmt.Errorf("%s: two versions of kube-proxy, %s and %s", file, d.version, version)
			}
			d.version = version
		}
		if k == kubeProxy && run.MinSyncPeriod != "" {
			k = kubeProxyShort
			switch period, err := time.ParseDuration(run.MinSyncPeriod); {
			case err != nil || period <= 0:
				return fmt.Errorf("%s: bad minSyncPeriod %q", file, run.MinSyncPeriod)
			case d.period > 0 && d.period != period:
				return fmt.Errorf("%s: two values of minSyncPeriod, %s and %s", file, d.period, period)
			default:
				d.period = period
			}
		}
		// A failed run counts with its measurements before the failure. The period has no
		// part in a start.
		if run.Start.Seconds > 0 && k == kubeProxyShort {
			n++
		} else if run.Start.Seconds > 0 {
			d.start[k].add(float64(run.Services), run.Start.Seconds)
			n++
		}
		if run.Change.P50Ms > 0 {
			d.change[k].add(float64(run.Services), run.Change.P50Ms/1000)
		}
		if run.Start.Seconds <= 0 && run.Failed == "" {
			return fmt.Errorf("%s: %s with %d Services has no time", file, run.Proxy, run.Services)
		}
	}
	if n == 0 {
		return fmt.Errorf("%s: no run in mode nftables with %d endpoints", file, endpoints)
	}
	return nil
}

// add inserts a point in the order of Services, or replaces the point with the same number
// of Services.
func (l *points) add(services, seconds float64) {
	i, found := slices.BinarySearchFunc(*l, services, func(p point, n float64) int {
		switch {
		case p.services < n:
			return -1
		case p.services > n:
			return 1
		}
		return 0
	})
	if found {
		(*l)[i].seconds = seconds // a later run
		return
	}
	*l = slices.Insert(*l, i, point{services, seconds})
}
