//go:build linux

package nftables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// MinimumKernel is the oldest kernel release whose nf_tables have all that is
// used. It is not compared with the running kernel's: [New] tries the features
// themselves.
const MinimumKernel = "5.15"

// ErrUnsupported is in the error of [New] and [Probe] where nf_tables cannot be
// used at all or lack a feature.
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
// transaction.
const probeTable = "proxier-probe"

// probe has the kernel check one table of each family with every kind of set,
// chain and rule there is, and forget it.
func (b *Backend) probe() error {
	local := ruleset.LocalTraffic{InterfacePrefix: "veth"}
	for _, f := range b.config.Families {
		w := newWriter(probeTable, b.config.mark())
		t := newTable(f, &ruleset.Node{LocalTraffic: local})
		t.measure(nil, b.config.StickyClients, 0)
		w.newTable(t)
		t.skeleton(w)
		for _, h := range []handling{handleNotPods, handleAlways, handleNear, handleNearOrDrop, handleReject, handleDrop} {
			c := class{handling: h, firewall: true, slots: exactSlots + 4}
			if h >= handleNearOrDrop {
				c.slots = 0
			}
			t.class(c, w)
		}
		t.nearClass(class{slots: 1, affinity: 10800e9}, w)
		t.prefix(f.Bits()/2, w)
		batch, err := w.finish([]*table{t})
		if err != nil {
			return fmt.Errorf("nftables: probe: %w", err)
		}
		w.deleteTable(f)
		if err := b.conn.Commit(batch); err != nil {
			feature := "netlink"
			var refused *nlbatch.Error
			if errors.As(err, &refused) {
				feature = refused.What
			}
			return &UnsupportedError{Family: f, Feature: feature, Err: err}
		}
	}
	return nil
}
