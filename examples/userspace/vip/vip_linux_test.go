package vip_test

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/examples/userspace/vip"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

func TestMain(m *testing.M) { conformance.Main(m) }

// inNode runs f in a network namespace with a few interfaces.
func inNode(t *testing.T, f func() error) {
	t.Helper()
	w := conformance.NewWorld(t, conformance.Options{New: func(testing.TB, conformance.Env) ruleset.Backend {
		return ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil })
	}})
	if err := w.Do(f); err != nil {
		t.Fatal(err)
	}
}

func TestHeldAddressesBelongToTheNode(t *testing.T) {
	inNode(t, func() error {
		a, err := vip.New()
		if err != nil {
			return err
		}
		defer a.Close()
		own, err := a.Own()
		if err != nil {
			return err
		}
		// An interface of the node has this address.
		mine := netip.MustParseAddr("192.0.2.1")
		if !slices.Contains(own, mine) || !slices.Contains(own, netip.MustParseAddr("2001:db8:1::1")) {
			t.Errorf("own addresses %v", own)
		}
		usable := func(x netip.Addr) bool {
			l, err := net.Listen("tcp", netip.AddrPortFrom(x, 0).String())
			if err != nil {
				return false
			}
			defer l.Close()
			c, err := net.Dial("tcp", l.Addr().String())
			if err == nil {
				c.Close()
			}
			return err == nil
		}
		expect := func(what string, want ...netip.Addr) {
			t.Helper()
			held, err := a.Held()
			slices.SortFunc(held, netip.Addr.Compare)
			if err != nil || !slices.Equal(held, want) {
				t.Errorf("%s: held %v, %v; want %v", what, held, err, want)
			}
		}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Error(err)
			}
		}
		four, six := netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00:10:96::a")
		expect("at first")
		for range 2 {
			must(a.Hold(four))
			must(a.Hold(six))
			must(a.Hold(mine))
			expect("held", four, six)
		}
		if !usable(four) {
			t.Errorf("the node does not have the held address %s", four)
		}
		if now, err := a.Own(); err != nil || !slices.Equal(now, own) {
			t.Errorf("own addresses %v, %v; want %v", now, err, own)
		}
		// Another process finds the held addresses.
		b, err := vip.New()
		if err != nil {
			return err
		}
		defer b.Close()
		for range 2 {
			must(b.Release(four))
			must(b.Release(mine))
			expect("released", six)
		}
		if usable(four) {
			t.Errorf("the node still has the released address %s", four)
		}
		if !usable(mine) {
			t.Errorf("the node lost its own address %s", mine)
		}
		for _, bad := range []netip.Addr{{}, netip.IPv4Unspecified(), netip.MustParseAddr("ff02::1"), netip.MustParseAddr("fe80::1%lo")} {
			if a.Hold(bad) == nil || a.Release(bad) == nil {
				t.Errorf("%s can be held", bad)
			}
		}
		return nil
	})
}
