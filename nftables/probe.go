//go:build linux

package nftables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// MinimumKernel is the oldest kernel release whose nf_tables have all that is
// used. It is not compared with the running kernel's: [New] tries the features
// themselves.
const MinimumKernel = "5.15"

// ErrUnsupported is in the error of [New] and [Probe] where nf_tables cannot be
// used at all or lack a feature: to try again is of no use.
var ErrUnsupported = errors.New("nftables: nf_tables cannot be used")

// UnsupportedError says which feature a kernel lacks. It is [ErrUnsupported].
type UnsupportedError struct {
	// Family is the family in whose table it was tried.
	Family tracker.Family
	// Feature is the object that was refused.
	Feature string
	// Err is the kernel's error.
	Err error
}

// Error says what is missing, and since when kernels have it.
func (e *UnsupportedError) Error() string {
	if errors.Is(e.Err, unix.EPERM) {
		return fmt.Sprintf("%v: CAP_NET_ADMIN is needed in the network namespace's user namespace: %v", ErrUnsupported, e.Err)
	}
	return fmt.Sprintf("%v: %s, %s (Linux %s or later is needed, with nf_tables, NAT and conntrack)",
		ErrUnsupported, e.Family, e.Err, MinimumKernel)
}

// Unwrap makes errors.Is find [ErrUnsupported] and the kernel's error number.
func (e *UnsupportedError) Unwrap() []error { return []error{ErrUnsupported, e.Err} }

// Probe reports whether a [Backend] with the configuration would find all it
// needs: nil, an [*UnsupportedError], or an error of the configuration. It
// changes nothing. [New] does the same.
func Probe(c Config) error {
	b, err := New(c)
	if err != nil {
		return err
	}
	return b.Close()
}

// probeTable is never seen by anybody: it is made and deleted in one
// transaction. One of somebody else's by that name is an error, and left alone.
const probeTable = "proxier-probe"

// probe has the kernel check one table of each family with every kind of set,
// chain and rule there is, and forget it.
func (b *Backend) probe() error {
	local := ruleset.LocalTraffic{InterfacePrefix: "veth"}
	for _, f := range b.config.Families {
		w := newWriter(probeTable, b.config.mark())
		t := newTable(f, &ruleset.Node{LocalTraffic: local})
		t.measure(nil, b.config.StickyClients, 0)
		w.newTableOnly(t)
		t.skeleton(w)
		for _, h := range []handling{handleNotPods, handleAlways, handleNear, handleNearOrDrop, handleReject, handleDrop} {
			c := class{handling: h, firewall: true, slots: exactSlots + 4}
			if h >= handleNearOrDrop {
				c.slots = 0
			}
			t.class(c, w)
		}
		t.nearClass(class{slots: 1, affinity: 10800e9}, w)
		t.class(class{slots: 251, hash: tracker.HashSourcePort}, w)
		t.prefix(f.Bits()/2, w)
		batch, err := w.finish([]*table{t})
		if err != nil {
			return fmt.Errorf("nftables: probe: %w", err)
		}
		w.deleteTable(f)
		if err := b.conn.Commit(batch); err != nil {
			return unsupported(f, err)
		}
	}
	return nil
}

// unsupported returns the error of probing a family: an [*UnsupportedError] unless
// it says nothing of what the kernel can do.
func unsupported(f tracker.Family, err error) error {
	var refused *nfnl.Error
	if !errors.As(err, &refused) {
		return fmt.Errorf("nftables: probe: %w", err)
	}
	switch refused.Errno {
	case unix.ENOMEM, unix.ENOBUFS, unix.EAGAIN, unix.EINTR, unix.EBUSY, unix.EEXIST, unix.EMFILE, unix.ENFILE:
		return fmt.Errorf("nftables: probe: %s: %w", f, err)
	}
	return &UnsupportedError{Family: f, Feature: refused.What, Err: err}
}

// unsupportedSocket returns the error of opening a socket: an [*UnsupportedError]
// if the kernel has no such sockets or allows none.
func unsupportedSocket(f tracker.Family, err error) error {
	for _, errno := range []unix.Errno{unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EPERM, unix.EACCES} {
		if errors.Is(err, errno) {
			return &UnsupportedError{Family: f, Feature: "netlink socket", Err: err}
		}
	}
	return fmt.Errorf("nftables: %w", err)
}
