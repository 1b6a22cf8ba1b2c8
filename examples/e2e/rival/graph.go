//go:build linux

package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"text/template"
	"time"
)

// line is a line of the graph, from the smallest number of Services to the largest.
type line struct {
	Label, Color, Dash string // Color is a key of a theme
	Points             []point
}

// Last returns the point with the most Services.
func (l *line) Last() point { return l.Points[len(l.Points)-1] }

type point struct {
	Services int
	Seconds  float64
}

// X and Y return the coordinates in pixels: from 100 to 45,000 Services and from 10 s to 10 µs.
func (p point) X() string {
	return fmt.Sprintf("%.1f", 76+494*math.Log(float64(p.Services)/100)/math.Log(450))
}

func (p point) Y() string { return fmt.Sprintf("%.1f", 122-50*math.Log10(p.Seconds)) }

// Took returns the time with two digits.
func (p point) Took() time.Duration {
	took := time.Duration(p.Seconds * 1e9)
	return took.Round(time.Duration(math.Pow10(int(math.Log10(float64(took))) - 1)))
}

var picture = template.Must(template.New("").Funcs(template.FuncMap{"thousands": thousands}).Parse(`{{$theme := .Theme -}}
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 500" width="760" height="500" role="img" fill="{{$theme.faint}}" font-size="13"
  font-family="system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif">
<title>One change: until it is in effect</title>
<text x="20" y="30" font-size="18" fill="{{$theme.text}}">One change: until it is in effect</text>
<text x="20" y="51">nftables mode, 10 endpoints a Service, logarithmic axes</text>
{{range .Times -}}
<path d="M76 {{.Y}}H570" stroke="{{$theme.grid}}"/><text x="66" y="{{.Y}}" dy="4.5" text-anchor="end">{{.Took}}</text>
{{end}}{{range .Services -}}
<path d="M{{.X}} 372v5" stroke="{{$theme.faint}}"/><text x="{{.X}}" y="394" text-anchor="middle">{{thousands .Services}}</text>
{{end -}}
<text x="323" y="416" text-anchor="middle">Services</text>
{{range .Lines}}{{$color := index $theme .Color}}{{range .Points -}}
<circle cx="{{.X}}" cy="{{.Y}}" r="3.5" fill="{{$color}}"/>
{{end -}}
<polyline points="{{range .Points}}{{.X}},{{.Y}} {{end}}" fill="none" stroke="{{$color}}" stroke-width="2.5" stroke-linejoin="round" stroke-dasharray="{{.Dash}}" stroke-linecap="round"/>
{{end -}}
<g font-size="14" stroke="{{$theme.background}}" stroke-width="5" stroke-linejoin="round" paint-order="stroke">
{{range .Lines -}}
<text x="{{.Last.X}}" y="{{.Last.Y}}" dx="10" dy="4.5" fill="{{index $theme .Color}}"><tspan font-weight="600">{{.Label}}</tspan> {{.Last.Took}}</text>
{{end -}}
</g>
<g font-size="12">
<text x="20" y="440">kube-proxy: with its default minSyncPeriod of 1 s, and with one of 1 ms, which is less than a sync takes.</text>
<text x="20" y="457">kube-proxy, nodeproxy: beside an API server, to the first connection that is answered.</text>
<text x="20" y="474">kube-proxy was not measured with more than 3,000 Services, with which it can block nf_tables for minutes.</text>
<text x="20" y="491">library alone: from objects in memory to the kernel's commit. floor: as many elements, or one, by bare netlink.</text>
</g>
</svg>
`))

// draw writes the graph of the median of changes one by one, and of a benchmark's output, to a folder: with
// the colors for a light and for a dark background.
func draw(folder, bench string, reports []*Report) error {
	text, err := os.ReadFile(bench)
	if err != nil {
		return err
	}
	lines := []line{{kubeProxy, kubeProxy, "0", nil}, {kubeProxy + ", 1 ms", kubeProxy, "7 5", nil}, {nodeproxy, nodeproxy, "0", nil}, {"library alone", nodeproxy, "7 5", nil}, {"floor", "faint", "1.5 5", nil}}
	add := func(i, services int, seconds float64) {
		lines[i].Points = append(lines[i].Points, point{services, seconds})
	}
	for _, run := range merge(reports) {
		i := slices.IndexFunc(lines, func(l line) bool { return l.Label == run.Proxy })
		if run.MinSyncPeriod != "" {
			i++
		}
		if run.Mode == "nftables" && run.Change.Count > 0 {
			add(i, run.Services, run.Change.P50ms/1000)
		}
	}
	for row := range strings.Lines(string(text)) {
		var services, n int
		var ns, floorNS float64
		name := strings.ReplaceAll(row, "/endpoints=10-", " ") // others have other numbers of endpoints
		if _, err := fmt.Sscanf(name, "BenchmarkOneEndpointChanged/services=%d %d %d %f ns/op %f floor-ns/op", &services, new(int), &n, &ns, &floorNS); err == nil {
			add(3, services, ns/1e9)
			add(4, services, floorNS/1e9)
		}
	}
	for _, l := range lines {
		if len(l.Points) == 0 {
			return fmt.Errorf("no figures for %s in the input", l.Label)
		}
	}
	axes := []point{{100, 10e-6}, {1000, 100e-6}, {3000, 1e-3}, {10000, 10e-3}, {45000, 100e-3}, {0, 1}, {0, 10}}
	for name, theme := range map[string]map[string]string{
		"light": {"text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0", "background": "#ffffff", kubeProxy: "#bc4c00", nodeproxy: "#0a53be"},
		"dark":  {"text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d", "background": "#0d1117", kubeProxy: "#f0883e", nodeproxy: "#6cb6ff"},
	} {
		var b bytes.Buffer
		err := picture.Execute(&b, map[string]any{"Theme": theme, "Times": axes, "Services": axes[:5], "Lines": lines})
		if err == nil {
			err = os.WriteFile(folder+"/one-change-"+name+".svg", b.Bytes(), 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
