package iptables

import "github.com/go-proxier/proxier/tracker"

// Trace is a set of functions that a [Backend] calls. Any of them, and the *Trace
// itself, may be nil. The goroutine that called Apply calls them before Apply returns.
// They must not call the Backend.
type Trace struct {
	// Applied is called once for each table, filter and nat, of each family that an
	// Apply brought up to date. Refused Services do not count as a failure of Apply here.
	Applied func(Info)
}

// Info describes one table after an Apply.
type Info struct {
	// Family is the table's address family.
	Family tracker.Family
	// Table is "filter" or "nat".
	Table string
	// Rules is how many rules the backend's chains have in the table. The jumps to them
	// from the kernel's own chains do not count, nor does the rule in KUBE-PROXY-CANARY.
	// Written is how many rules this Apply wrote, including rules that were there before
	// and those that it tried in search of a refused Service.
	Rules, Written int
}
