//go:build linux

package iptables

import "github.com/go-proxier/proxier/tracker"

// Trace is a set of functions that are told what a [Backend] does. Any of them, and
// the *Trace itself, may be nil. They are called by the goroutine that called Apply,
// before it returns, and must not call the Backend.
type Trace struct {
	// Applied is called for each family that an Apply brought up to date, Services
	// that were refused aside, and for each table of it: filter and nat.
	Applied func(Info)
}

// Info is what there is in one table.
type Info struct {
	// Family is whose table it is.
	Family tracker.Family
	// Table is "filter" or "nat".
	Table string
	// Rules is how many rules the backend's chains have there. The jumps to them from
	// the kernel's own chains are not counted, nor is the rule in KUBE-PROXY-CANARY.
	// Written is how many of them this Apply wrote, whether they were there before or
	// not, and those that it tried where something was refused.
	Rules, Written int
}

func (t *Trace) applied(f *family) {
	if t == nil || t.Applied == nil {
		return
	}
	size := f.model.size()
	for table := range tables {
		t.Applied(Info{Family: f.family, Table: table.String(), Rules: size[table], Written: f.written[table]})
	}
}
