//go:build linux

package main

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
)

// theme holds the colors for a background.
type theme struct {
	name, text, faint, grid string
	background              string // drawn behind labels, over lines
	lines                   [lines]string
}

var themes = []theme{
	{"light", "#1f2328", "#59636e", "#d1d9e0", "#ffffff", [lines]string{"#bc4c00", "#bc4c00", "#0a53be", "#0a53be", "#6e7781"}},
	{"dark", "#f0f6fc", "#9198a1", "#3d444d", "#0d1117", [lines]string{"#f0883e", "#f0883e", "#6cb6ff", "#6cb6ff", "#9198a1"}},
}

var dashes = [lines]string{lineShortPeriod: "7 5", lineLibrary: "7 5", lineFloor: "1.5 5"}

type graph struct {
	file, title, subtitle string
	notes                 []string
	lines                 []line
}

type line struct {
	index int
	label string
	points
}

func (d *figures) graphs() []graph {
	labels := [lines]string{kubeProxy, "", nodeproxy, "library alone", "floor"}
	periods := "kube-proxy with its default minSyncPeriod of 1 s."
	if d.period > 0 {
		period := duration(d.period.Seconds(), 1)
		labels[lineShortPeriod] = "kube-proxy, " + period
		periods = "kube-proxy: with its default minSyncPeriod of 1 s, and with one of " + period + ", which is less than a sync takes."
	}
	proxies := nodeproxy
	if d.version != "" {
		proxies = "kube-proxy " + d.version + ", nodeproxy"
	}
	notes := append([]string{proxies + ": beside an API server, to the first connection that is answered."}, notes...)
	measured := func(all [lines]points) (out []line) {
		for i, p := range all {
			if len(p) > 0 {
				out = append(out, line{i, labels[i], p})
			}
		}
		return out
	}
	const axes = "nftables mode, 10 endpoints a Service, logarithmic axes"
	return []graph{
		{"cold-start", "Cold start: until every Service works", axes, notes, measured(d.start)},
		{"one-change", "One change: until it is in effect", axes, append([]string{periods}, notes...), measured(d.change)},
	}
}

// notes explain further lines of all graphs.
var notes = []string{
	"kube-proxy was not measured with more than 3,000 Services, with which it can block nf_tables for minutes.",
	"library alone: from objects in memory to the kernel's commit. floor: as many elements, or one, by bare netlink.",
}

// The size of the picture without notes and the margins of the plot in it, in pixels. Each note
// adds a line.
const (
	width, plain             = 760, 432
	left, right, top, bottom = 76, 190, 72, 60
	noteLine                 = 17
)

// svg draws the graph. The coordinates are rounded to tenths.
func (g graph) svg(t theme) []byte {
	x0, x1, y0, y1 := g.bounds()
	x := func(services int) float64 {
		return left + (width-left-right)*(log10(services)-x0)/(x1-x0)
	}
	y := func(v float64) float64 {
		return plain - bottom - (plain-top-bottom)*(math.Log10(v)-y0)/(y1-y0)
	}
	var b bytes.Buffer
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	height := plain + noteLine*len(g.notes)
	p(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" font-family="system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif">`, width, height, width, height)
	p(`<title>%s</title>`, g.title)
	p(`<desc>%s</desc>`, g.describe())
	p(`<text x="20" y="30" font-size="18" font-weight="600" fill="%s">%s</text>`, t.text, g.title)
	p(`<text x="20" y="51" font-size="13" fill="%s">%s</text>`, t.faint, g.subtitle)

	for e := math.Ceil(y0 - 1e-9); e <= y1+1e-9; e++ {
		v := math.Pow(10, e)
		p(`<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="%s"/>`, left, y(v), width-right, y(v), t.grid)
		p(`<text x="%d" y="%.1f" font-size="13" text-anchor="end" fill="%s">%s</text>`, left-10, y(v)+4.5, t.faint, duration(v, 1))
	}
	for _, n := range g.ticks() {
		p(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/>`, x(n), plain-bottom, x(n), plain-bottom+5, t.faint)
		p(`<text x="%.1f" y="%d" font-size="13" text-anchor="middle" fill="%s">%s</text>`, x(n), plain-bottom+22, t.faint, thousands(n))
	}
	p(`<text x="%.1f" y="%d" font-size="13" text-anchor="middle" fill="%s">Services</text>`, float64(left+width-right)/2, plain-bottom+44, t.faint)

	for _, l := range g.lines {
		color, dash := t.lines[l.index], ""
		if d := dashes[l.index]; d != "" {
			dash = fmt.Sprintf(` stroke-dasharray="%s" stroke-linecap="round"`, d)
		}
		var path []string
		for _, q := range l.points {
			path = append(path, fmt.Sprintf("%.1f,%.1f", x(q.services), y(q.seconds)))
		}
		p(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2.5" stroke-linejoin="round"%s/>`, strings.Join(path, " "), color, dash)
		for _, q := range l.points {
			p(`<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>`, x(q.services), y(q.seconds), color)
		}
	}
	for i, at := range g.labelHeights(y) {
		l := g.lines[i]
		last := l.points[len(l.points)-1]
		lx, ly, anchor := x(last.services)+10, at+4.5, "start"
		if len(l.points) > 1 && log10(last.services) < x1 { // other lines continue to the right of it
			lx, ly, anchor = lx-10, y(last.seconds)-12, "middle"
		}
		p(`<text x="%.1f" y="%.1f" font-size="14" text-anchor="%s" fill="%s" stroke="%s" stroke-width="5" stroke-linejoin="round" paint-order="stroke"><tspan font-weight="600">%s</tspan> %s</text>`, lx, ly, anchor, t.lines[l.index], t.background, l.label, duration(last.seconds, 2))
	}
	for i, note := range g.notes {
		p(`<text x="20" y="%d" font-size="12" fill="%s">%s</text>`, plain-bottom+68+noteLine*i, t.faint, note)
	}
	p(`</svg>`)
	return b.Bytes()
}

func log10(services int) float64 { return math.Log10(float64(services)) }

// labelHeights returns the vertical position of each line's label: beside the last point, or
// shifted if labels would overlap.
func (g graph) labelHeights(y func(float64) float64) []float64 {
	const apart = 19
	at := make([]float64, len(g.lines))
	order := make([]int, len(g.lines))
	for i, l := range g.lines {
		at[i], order[i] = y(l.points[len(l.points)-1].seconds), i
	}
	slices.SortStableFunc(order, func(a, b int) int { return int(math.Copysign(1, at[a]-at[b])) })
	for range 50 { // shift labels apart until none overlap
		for i := 1; i < len(order); i++ {
			a, b := order[i-1], order[i]
			if g.lines[a].points[len(g.lines[a].points)-1].services != g.lines[b].points[len(g.lines[b].points)-1].services {
				continue // side by side
			}
			if gap := apart - (at[b] - at[a]); gap > 0 {
				at[a], at[b] = at[a]-gap/2, at[b]+gap/2
			}
		}
	}
	return at
}

// bounds returns the decimal logarithms of the axes' ends. The ends of the time axis are
// whole numbers.
func (g graph) bounds() (x0, x1, y0, y1 float64) {
	x0, x1, y0, y1 = math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	for _, l := range g.lines {
		for _, p := range l.points {
			x0, x1 = min(x0, log10(p.services)), max(x1, log10(p.services))
			y0, y1 = min(y0, math.Log10(p.seconds)), max(y1, math.Log10(p.seconds))
		}
	}
	if x0 == x1 {
		x0, x1 = x0-0.5, x1+0.5
	}
	y0, y1 = math.Floor(y0), math.Ceil(y1)
	if y0 == y1 {
		y1++
	}
	return x0, x1, y0, y1
}

// ticks returns the numbers of Services that were measured.
func (g graph) ticks() (out []int) {
	for _, l := range g.lines {
		for _, p := range l.points {
			out = append(out, p.services)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// describe returns the figures as text.
func (g graph) describe() string {
	var b strings.Builder
	b.WriteString(g.subtitle + ".")
	for _, l := range g.lines {
		fmt.Fprintf(&b, " %s:", l.label)
		for i, p := range l.points {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, " %s with %s Services", duration(p.seconds, 2), thousands(p.services))
		}
		b.WriteByte('.')
	}
	return b.String()
}

// duration returns a time with its unit and some significant digits.
func duration(seconds float64, digits int) string {
	for _, u := range []struct {
		name string
		size float64
	}{{"s", 1}, {"ms", 1e-3}, {"µs", 1e-6}, {"ns", 1e-9}} {
		if seconds >= u.size*0.9995 || u.size == 1e-9 {
			v := seconds / u.size
			places := max(0, digits-1-int(math.Floor(math.Log10(v)+1e-9)))
			return fmt.Sprintf("%.*f %s", places, v, u.name)
		}
	}
	return ""
}
