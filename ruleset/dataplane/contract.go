package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Backend is a [ruleset.Backend] of a data plane that other processes can alter, such as a kernel: those of packages
// nftables, iptables and ipvs. All methods may be called concurrently.
type Backend interface {
	ruleset.Backend
	ruleset.Limiter
	TrafficReader
	// Check compares the data plane with what Apply has programmed. It returns a [*DriftError] if another process
	// altered it, and another error if it cannot be read. Before the first full delta it returns nil. It changes no
	// rule of a Service.
	Check(ctx context.Context) error
	// Watch calls drifted with each alteration by another process, until ctx ends or the backend is closed, and
	// returns the error of ctx or one that wraps [os.ErrClosed]. The interval, which must be positive, is the time
	// between two checks of a data plane that does not report alterations itself. The caller then requests a full
	// delta: see [ruleset.Cursor.Resync].
	Watch(ctx context.Context, interval time.Duration, drifted func(error)) error
	// Close releases the backend's resources and ends Watch. The rules stay in effect. Later calls of other methods
	// return an error that wraps [os.ErrClosed].
	Close() error
}

// MasqueradeMark is the packet mark of connections that must be masqueraded: one bit. Other programs may use all
// other bits. The zero value means [DefaultMasqueradeMark].
type MasqueradeMark uint32

// DefaultMasqueradeMark is bit 14, the default of kube-proxy's --iptables-masquerade-bit.
const DefaultMasqueradeMark MasqueradeMark = 1 << 14

// ErrUnsupported is wrapped by errors about a kernel feature, a program or a privilege that this system lacks, each
// an [*UnsupportedError]. Retrying is useless until the system changes.
var ErrUnsupported = errors.New("not supported on this system")

// UnsupportedError reports what a system lacks. It wraps [ErrUnsupported].
type UnsupportedError struct {
	// Backend is the package that needs the feature, such as "nftables".
	Backend string
	// Family is the address family that needs the feature, or 0 for both.
	Family tracker.Family
	// Feature is the missing feature: a kernel object, module, program or capability.
	Feature string
	// Minimum is the oldest release that has the feature, such as "Linux 5.15", or "" if the system's age is not the
	// reason.
	Minimum string
	// Err is the system's error, or nil.
	Err error
}

// Error returns all fields in one line.
func (e *UnsupportedError) Error() string {
	s := e.Backend + ": " + e.Feature + " is " + ErrUnsupported.Error()
	if e.Family != 0 {
		s = e.Backend + ": " + e.Feature + " for " + e.Family.String() + " is " + ErrUnsupported.Error()
	}
	if e.Minimum != "" {
		s += " (" + e.Minimum + " or later is needed)"
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns [ErrUnsupported] and Err.
func (e *UnsupportedError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrUnsupported}
	}
	return []error{ErrUnsupported, e.Err}
}

// Query is the argument of a kernel backend's Lookup.
type Query struct {
	// Packet is the first packet of the connection.
	Packet ruleset.Packet
	// Internal reports whether the packet is internal traffic: from the node or one of its pods (see
	// [ruleset.Frontend.ShortCircuit]).
	Internal bool
	// NodePort reports whether the packet's destination is a NodePort, so that the
	// entry is found by its port alone.
	NodePort bool
}

// Found is the result of Lookup: the entry that it read from the kernel, or the zero value.
type Found struct {
	// Entry reports whether there is an entry.
	Entry bool
	// Where describes the entry in terms of the backend's own tools: its table, chain or virtual server.
	Where string
	// Service is the name of the Service port, or "" if the kernel does not store it.
	Service string
	// Endpoints holds the endpoints of new connections, sorted and without
	// duplicates. It is empty if connections are refused or dropped.
	Endpoints []netip.AddrPort
}

// ErrNoRules is wrapped by the error of Lookup if the backend has programmed nothing in
// the network namespace.
var ErrNoRules = errors.New("no rules of this backend in the network namespace")

// DriftError is the error of a backend whose objects another process changed. It wraps [ruleset.ErrNeedFull]: a full
// delta repairs the change. The zero value names no object.
type DriftError struct {
	// Backend is the kind of backend, such as "nftables".
	Backend string
	// Family is the address family of the change.
	Family tracker.Family
	// What describes the change for people.
	What string
}

// Error returns the backend, the family and the change.
func (e *DriftError) Error() string {
	return fmt.Sprintf("%s: %s was altered by another process: %s", e.Backend, e.Family, e.What)
}

// Unwrap returns [ruleset.ErrNeedFull].
func (e *DriftError) Unwrap() error { return ruleset.ErrNeedFull }

// Watch calls check at the interval until ctx is done or check returns [os.ErrClosed], and returns that error. It
// calls failed with every other error of check, except after ctx is done. It starts no goroutine and never calls
// check and failed concurrently. It returns an error immediately if the interval is not positive.
func Watch(ctx context.Context, interval time.Duration, check func(context.Context) error, failed func(error)) error {
	if interval <= 0 {
		return fmt.Errorf("ruleset: watch: interval %v is not positive", interval)
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		switch err := check(ctx); {
		case errors.Is(err, os.ErrClosed):
			return err
		case err != nil && ctx.Err() == nil:
			failed(err)
		}
	}
}

// LevelTransaction is the level at which the backends of packages nftables, iptables and ipvs log each transaction
// before they commit it, as text for nft, iptables-restore, or ipvsadm, ipset and ip. It is below [slog.LevelDebug],
// because the first transaction has every Service of the cluster. With logr it is verbosity 8, so "nodeproxy run
// -v=8" shows them.
const LevelTransaction slog.Level = -8
