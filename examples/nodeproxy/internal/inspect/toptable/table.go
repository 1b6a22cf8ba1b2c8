// Package toptable makes the table of "nodeproxy top": rows from two samples of counters, as
// text, as JSON, and as a screen that is redrawn periodically.
package toptable

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Name identifies a row.
type Name struct {
	// Service is NAMESPACE/NAME, or ADDR:PORT in modes whose kernel does not store names.
	Service  string `json:"service"`
	Port     string `json:"port,omitempty"`
	Protocol string `json:"protocol"`
	Family   string `json:"family"`
}

// NameOf returns the name of a Service port.
func NameOf(k tracker.Key) Name {
	return Name{k.NamespacedName.String(), k.Port, string(k.Protocol), k.Family.String()}
}

// String returns the name as the table shows it.
func (n Name) String() string {
	s := n.Service
	if n.Port != "" {
		s += ":" + n.Port
	}
	return complaint.Printable(s + "/" + n.Protocol)
}

// Sample holds the counters at one moment.
type Sample struct {
	At    time.Time
	Known dataplane.CounterSet
	// Counters has all Service ports with traffic, and may have others.
	Counters map[Name]dataplane.Counters
	// Ready is the number of endpoints of each Service port, nil if it is not known.
	Ready map[tracker.Key]int
}

// Row is a line of the table. Fields that the kernel does not count are nil.
type Row struct {
	Name
	// ConnectionsPerSecond and BytesPerSecond are rates between two samples.
	ConnectionsPerSecond *float64 `json:"connectionsPerSecond"`
	BytesPerSecond       *float64 `json:"bytesPerSecond"`
	Ready                *int     `json:"ready"`
	// Connections, Bytes, Refused and Dropped are totals.
	Connections *uint64 `json:"connections"`
	Bytes       *uint64 `json:"bytes"`
	Refused     *uint64 `json:"refused"`
	Dropped     *uint64 `json:"dropped"`
	// refusing and dropping report that Refused and Dropped grew between the samples.
	refusing, dropping bool
}

// Document is the JSON output of "top --once -o json".
type Document struct {
	Mode string `json:"mode"`
	// Seconds is the time between the two samples.
	Seconds  float64 `json:"seconds"`
	Services []Row   `json:"services"`
}

// The columns to sort by.
const (
	ByConnections = "connections"
	ByBytes       = "bytes"
	ByReady       = "ready"
	ByRefused     = "refused"
	ByDropped     = "dropped"
	ByName        = "name"
)

// keys are the keys that sort by a column.
var keys = map[byte]string{'c': ByConnections, 'b': ByBytes, 'r': ByReady, 'e': ByRefused, 'd': ByDropped, 'n': ByName}

// Sorts reports whether there is a column to sort by.
func Sorts(column string) bool {
	return slices.Contains(slices.Collect(maps.Values(keys)), column)
}

// View selects and sorts rows. The zero value shows all rows by name.
type View struct {
	Sort     string
	Reversed bool
	Filter   string // a part of the name
}

// Rows returns the rows of two samples in the view's order: the largest first, or by name.
func (v View) Rows(first, last Sample) []Row {
	ready := map[Name]int{}
	for k, n := range last.Ready {
		ready[NameOf(k)] = n
	}
	names := map[Name]bool{}
	for n := range last.Counters {
		names[n] = true
	}
	for n := range ready {
		names[n] = true
	}
	seconds := last.At.Sub(first.At).Seconds()
	rows := []Row{}
	for name := range names {
		if !strings.Contains(strings.ToLower(name.String()), strings.ToLower(v.Filter)) {
			continue
		}
		now, before := last.Counters[name], first.Counters[name]
		// Counters restart at 0 when a Service port is created again.
		since := func(now, before uint64) uint64 {
			if now < before {
				return now
			}
			return now - before
		}
		rate := func(now, before uint64) *float64 {
			if seconds <= 0 {
				return new(float64)
			}
			r := float64(since(now, before)) / seconds
			return &r
		}
		r := Row{Name: name}
		if last.Known.Has(dataplane.CountsConnections) {
			r.Connections, r.ConnectionsPerSecond = &now.Connections, rate(now.Connections, before.Connections)
		}
		if last.Known.Has(dataplane.CountsBytes) {
			r.Bytes, r.BytesPerSecond = &now.Bytes, rate(now.Bytes, before.Bytes)
		}
		if last.Known.Has(dataplane.CountsRefused) {
			r.Refused, r.refusing = &now.Refused, since(now.Refused, before.Refused) > 0
		}
		if last.Known.Has(dataplane.CountsDropped) {
			r.Dropped, r.dropping = &now.Dropped, since(now.Dropped, before.Dropped) > 0
		}
		if n, ok := ready[name]; ok {
			r.Ready = &n
		}
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b Row) int {
		by := 0
		switch v.Sort {
		case ByConnections:
			by = cmp.Or(compare(b.ConnectionsPerSecond, a.ConnectionsPerSecond), compare(b.Connections, a.Connections))
		case ByBytes:
			by = cmp.Or(compare(b.BytesPerSecond, a.BytesPerSecond), compare(b.Bytes, a.Bytes))
		case ByReady:
			by = compare(b.Ready, a.Ready)
		case ByRefused:
			by = compare(b.Refused, a.Refused)
		case ByDropped:
			by = compare(b.Dropped, a.Dropped)
		}
		by = cmp.Or(by, cmp.Compare(a.Service, b.Service), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Family, b.Family))
		if v.Reversed {
			return -by
		}
		return by
	})
	return rows
}

// compare compares two values. nil, an unknown value, is the least.
func compare[T cmp.Ordered](a, b *T) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	}
	return cmp.Compare(*a, *b)
}

// header has the columns' titles, and columns returns their format.
var header = []any{"SERVICE", "FAMILY", "CONN/S", "BYTES/S", "READY", "REFUSED", "DROPPED"}

func columns(nameWidth int) string {
	return fmt.Sprintf("%%-%d.%ds %%-6s %%9s %%9s %%6s %%8s %%8s", nameWidth, nameWidth)
}

// cells returns a row's texts.
func (r Row) cells() []any {
	ready := "-"
	if r.Ready != nil {
		ready = fmt.Sprint(*r.Ready)
	}
	return []any{r.Name.String(), r.Family, cell(r.ConnectionsPerSecond), cell(r.BytesPerSecond), ready, cell(r.Refused), cell(r.Dropped)}
}

func cell[T uint64 | float64](n *T) string {
	if n == nil {
		return "-"
	}
	return short(float64(*n))
}

// short returns a number in at most six characters.
func short(f float64) string {
	for _, u := range []struct {
		size float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}} {
		if f >= u.size {
			if u.name == "k" {
				return fmt.Sprintf("%.1fk", f/1e3)
			}
			return fmt.Sprintf("%.1f%s", f/u.size, u.name)
		}
	}
	if f == float64(int64(f)) || f >= 100 {
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.1f", f)
}

// Plain returns the table as text for a file or a pipe.
func Plain(rows []Row) string {
	width := 20
	for _, r := range rows {
		width = max(width, len(r.Name.String()))
	}
	var b strings.Builder
	fmt.Fprintf(&b, columns(width)+"\n", header...)
	for _, r := range rows {
		fmt.Fprintf(&b, columns(width)+"\n", r.cells()...)
	}
	return b.String()
}
