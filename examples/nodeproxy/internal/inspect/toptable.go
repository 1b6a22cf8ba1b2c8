package inspect

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// rowName identifies a row.
type rowName struct {
	// Service is NAMESPACE/NAME, or ADDR:PORT in modes whose kernel does not store names.
	Service  string `json:"service"`
	Port     string `json:"port,omitempty"`
	Protocol string `json:"protocol"`
	Family   string `json:"family"`
}

func nameOf(k tracker.Key) rowName {
	return rowName{k.NamespacedName.String(), k.Port, string(k.Protocol), k.Family.String()}
}

// String returns the name as the table shows it.
func (n rowName) String() string {
	s := n.Service
	if n.Port != "" {
		s += ":" + n.Port
	}
	return complaint.Printable(s + "/" + n.Protocol)
}

// sample holds the counters at one moment.
type sample struct {
	at    time.Time
	known dataplane.CounterSet
	// counters has all Service ports with traffic, and may have others.
	counters map[rowName]dataplane.Counters
	// ready is the number of endpoints of each Service port, nil if it is not known.
	ready map[tracker.Key]int
}

// row is a line of the table. Fields that the kernel does not count are nil.
type row struct {
	rowName
	// ConnectionsPerSecond and BytesPerSecond are rates between two samples.
	ConnectionsPerSecond *float64 `json:"connectionsPerSecond"`
	BytesPerSecond       *float64 `json:"bytesPerSecond"`
	Ready                *float64 `json:"ready"`
	// Connections, Bytes, Refused and Dropped are totals.
	Connections *float64 `json:"connections"`
	Bytes       *float64 `json:"bytes"`
	Refused     *float64 `json:"refused"`
	Dropped     *float64 `json:"dropped"`
	// lost reports that Refused or Dropped grew between the samples.
	lost bool
}

// column is a column of the table.
type column struct {
	name  string // by which --sort selects it
	key   byte   // that selects it
	title string
	// value returns what the column shows and sorts by. then decides between equal values.
	value, then func(row) *float64
}

const byName, byConnections = "name", "connections"

// columns returns the columns behind those of the name and the family.
func columns() []column {
	none := func(row) *float64 { return nil }
	return []column{
		{byConnections, 'c', "   CONN/S", func(r row) *float64 { return r.ConnectionsPerSecond }, func(r row) *float64 { return r.Connections }},
		{"bytes", 'b', "  BYTES/S", func(r row) *float64 { return r.BytesPerSecond }, func(r row) *float64 { return r.Bytes }},
		{"ready", 'r', " READY", func(r row) *float64 { return r.Ready }, none},
		{"refused", 'e', " REFUSED", func(r row) *float64 { return r.Refused }, none},
		{"dropped", 'd', " DROPPED", func(r row) *float64 { return r.Dropped }, none},
	}
}

// columnNames returns what to sort by.
func columnNames() (out []string) {
	for _, c := range columns() {
		out = append(out, c.name)
	}
	return append(out, byName)
}

// view selects and sorts rows. The zero value shows all rows by name.
type view struct {
	sort     string
	reversed bool
	filter   string // a part of the name
}

// rows returns the rows of two samples in the view's order: the largest first, or by name.
func (v view) rows(first, last sample) []row {
	ready := map[rowName]*float64{}
	for n := range last.counters {
		ready[n] = nil
	}
	for k, n := range last.ready {
		ready[nameOf(k)] = new(float64(n))
	}
	seconds := cmp.Or(last.at.Sub(first.at).Seconds(), 1)
	out := []row{}
	for n, ready := range ready {
		if !strings.Contains(strings.ToLower(n.String()), strings.ToLower(v.filter)) {
			continue
		}
		now, before := last.counters[n], first.counters[n]
		count := func(kind dataplane.CounterSet, now, before uint64) (total, rate *float64) {
			switch {
			case !last.known.Has(kind):
				return nil, nil
			case before > now:
				before = 0 // the counter restarted when the Service port was created again
			}
			return new(float64(now)), new(float64(now-before) / seconds)
		}
		var refused, dropped *float64
		r := row{rowName: n, Ready: ready}
		r.Connections, r.ConnectionsPerSecond = count(dataplane.CountsConnections, now.Connections, before.Connections)
		r.Bytes, r.BytesPerSecond = count(dataplane.CountsBytes, now.Bytes, before.Bytes)
		r.Refused, refused = count(dataplane.CountsRefused, now.Refused, before.Refused)
		r.Dropped, dropped = count(dataplane.CountsDropped, now.Dropped, before.Dropped)
		r.lost = number(refused) > 0 || number(dropped) > 0
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b row) int {
		by := 0
		for _, c := range columns() {
			if c.name == v.sort {
				by = cmp.Or(cmp.Compare(number(c.value(b)), number(c.value(a))), cmp.Compare(number(c.then(b)), number(c.then(a))))
			}
		}
		by = cmp.Or(by, cmp.Compare(a.Service, b.Service), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Family, b.Family))
		if v.reversed {
			return -by
		}
		return by
	})
	return out
}

// number returns what f points to, or -1 if it is nil: the value is unknown.
func number(f *float64) float64 {
	if f == nil {
		return -1
	}
	return *f
}

// table returns the header and a line for each row. Names have a width.
func table(rows []row, width int) []string {
	line := func(name, family string) string { return fmt.Sprintf("%-*.*s %-6s", width, width, name, family) }
	header := line("SERVICE", "FAMILY")
	for _, c := range columns() {
		header += " " + c.title
	}
	out := []string{header}
	for _, r := range rows {
		text := line(r.String(), r.Family)
		for _, c := range columns() {
			cell := "-"
			if n := c.value(r); n != nil {
				cell = short(*n)
			}
			text += fmt.Sprintf(" %*s", len(c.title), cell)
		}
		out = append(out, text)
	}
	return out
}

// short returns a number in at most six characters.
func short(f float64) string {
	for _, u := range []struct {
		from, unit float64
		name       string
	}{{1e12, 1e12, "T"}, {1e9, 1e9, "G"}, {1e6, 1e6, "M"}, {1e4, 1e3, "k"}} {
		if f >= u.from {
			return fmt.Sprintf("%.1f%s", f/u.unit, u.name)
		}
	}
	if f >= 100 || f == float64(int64(f)) {
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.1f", f)
}

// plain returns the table as text for a file or a pipe.
func plain(rows []row) string {
	width := 20
	for _, r := range rows {
		width = max(width, len(r.String()))
	}
	return strings.Join(table(rows, width), "\n") + "\n"
}
