//go:build linux

package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"
)

// line is a line of the graph, from the smallest number of Services to the largest.
type line struct {
	label, color, dash string
	points             []point
}

type point struct {
	services int
	seconds  float64
}

// draw writes the graph of the median of changes one by one, and of a benchmark's output, to a folder: with
// the colors for a light and for a dark background.
func draw(folder, bench string, reports []*Report) error {
	text, err := os.ReadFile(bench)
	if err != nil {
		return err
	}
	for _, theme := range []struct{ name, text, faint, grid, background, kubeProxy, nodeproxy string }{
		{"light", "#1f2328", "#59636e", "#d1d9e0", "#ffffff", "#bc4c00", "#0a53be"},
		{"dark", "#f0f6fc", "#9198a1", "#3d444d", "#0d1117", "#f0883e", "#6cb6ff"},
	} {
		library, floor := line{"library alone", theme.nodeproxy, "7 5", nil}, line{"floor", theme.faint, "1.5 5", nil}
		lines := []*line{{kubeProxy, theme.kubeProxy, "0", nil}, {kubeProxy + ", 1 ms", theme.kubeProxy, "7 5", nil}, {nodeproxy, theme.nodeproxy, "0", nil}, &library, &floor}
		for _, run := range merge(reports) {
			i := slices.IndexFunc(lines, func(l *line) bool { return l.label == run.Proxy })
			if run.MinSyncPeriod != "" {
				i++
			}
			if run.Mode == "nftables" && run.Change.Count > 0 {
				lines[i].points = append(lines[i].points, point{run.Services, run.Change.P50ms / 1000})
			}
		}
		for row := range strings.Lines(string(text)) {
			var services, n int
			var ns, floorNS float64
			name := strings.ReplaceAll(row, "/endpoints=10-", " ") // others have other numbers of endpoints
			if _, err := fmt.Sscanf(name, "BenchmarkOneEndpointChanged/services=%d %d %d %f ns/op %f floor-ns/op", &services, new(int), &n, &ns, &floorNS); err == nil {
				library.points = append(library.points, point{services, ns / 1e9})
				floor.points = append(floor.points, point{services, floorNS / 1e9})
			}
		}
		var b bytes.Buffer
		p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
		label := func(x, y float64, size int, anchor, color, text string) {
			p(`<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s" fill="%s">%s</text>`, x, y, size, anchor, color, text)
		}
		p(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 500" width="760" height="500" role="img" font-family="system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif">`)
		p(`<title>One change: until it is in effect</title>`)
		label(20, 30, 18, "start", theme.text, "One change: until it is in effect")
		label(20, 51, 13, "start", theme.faint, "nftables mode, 10 endpoints a Service, logarithmic axes")
		for v := 10 * time.Microsecond; v <= 10*time.Second; v *= 10 {
			p(`<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="%s"/>`, left, y(v.Seconds()), right, y(v.Seconds()), theme.grid)
			label(left-10, y(v.Seconds())+4.5, 13, "end", theme.faint, v.String())
		}
		for _, n := range []int{100, 1000, 3000, 10000, most} {
			p(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/>`, x(n), bottom, x(n), bottom+5, theme.faint)
			label(x(n), bottom+22, 13, "middle", theme.faint, thousands(n))
		}
		label((left+right)/2, bottom+44, 13, "middle", theme.faint, "Services")
		for _, l := range lines {
			if len(l.points) == 0 {
				return fmt.Errorf("no figures for %s in the input", l.label)
			}
			var path []string
			for _, q := range l.points {
				path = append(path, fmt.Sprintf("%.1f,%.1f", x(q.services), y(q.seconds)))
				p(`<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>`, x(q.services), y(q.seconds), l.color)
			}
			p(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2.5" stroke-linejoin="round" stroke-dasharray="%s" stroke-linecap="round"/>`, strings.Join(path, " "), l.color, l.dash)
		}
		p(`<g stroke="%s" stroke-width="5" stroke-linejoin="round" paint-order="stroke">`, theme.background)
		for _, l := range lines {
			last := l.points[len(l.points)-1]
			took := time.Duration(last.seconds * 1e9)
			digits := time.Duration(math.Pow10(int(math.Log10(float64(took))) - 1)) // two
			label(x(last.services)+10, y(last.seconds)+4.5, 14, "start", l.color, fmt.Sprintf(`<tspan font-weight="600">%s</tspan> %v`, l.label, took.Round(digits)))
		}
		p(`</g>`)
		for i, note := range []string{
			"kube-proxy: with its default minSyncPeriod of 1 s, and with one of 1 ms, which is less than a sync takes.",
			"kube-proxy, nodeproxy: beside an API server, to the first connection that is answered.",
			"kube-proxy was not measured with more than 3,000 Services, with which it can block nf_tables for minutes.",
			"library alone: from objects in memory to the kernel's commit. floor: as many elements, or one, by bare netlink.",
		} {
			label(20, float64(bottom+68+17*i), 12, "start", theme.faint, note)
		}
		p(`</svg>`)
		if err := os.WriteFile(folder+"/one-change-"+theme.name+".svg", b.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// The plot in the picture, in pixels, and the most Services.
const (
	left, right, top, bottom = 76, 570, 72, 372
	most                     = 45000
)

// x and y return the coordinates of a point: from 100 Services to the most, and from 10 µs to 10 s.
func x(services int) float64 {
	return left + (right-left)*math.Log(float64(services)/100)/math.Log(most/100)
}

func y(seconds float64) float64 { return bottom - (bottom-top)*math.Log10(seconds/10e-6)/6 }
