package dataplane

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestSocketHearsItsAudience runs filters of random audiences in the kernel, and compares
// the sources that a socket hears with the prefixes.
func TestSocketHearsItsAudience(t *testing.T) {
	t.Parallel()
	var b *Backend
	w := conformance.NewWorld(t, conformance.Options{New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b = inWorld(tb, env, Config{})
		return b
	}})
	r := rand.New(rand.NewPCG(5, 6))
	for _, base := range []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("2001:db8:77::/48")} {
		// Addresses differ in a bit or two, so prefixes of all lengths contain some of them.
		random := func() netip.Addr {
			a := base.Addr().AsSlice()
			for range r.IntN(3) {
				bit := base.Bits() + r.IntN(8*len(a)-base.Bits())
				a[bit/8] |= 0x80 >> (bit % 8)
			}
			out, _ := netip.AddrFromSlice(a)
			return out
		}
		some := 0
		var sources []netip.Addr
		for range 60 {
			sources = append(sources, random())
		}
		must.Do(t, w.Do(func() error {
			for _, a := range sources {
				if err := b.config.Addresses.Hold(a); err != nil {
					return err
				}
			}
			return nil
		}))
		for range 40 {
			var who audience
			for range r.IntN(3) {
				list := []netip.Prefix{}
				for range r.IntN(5) {
					bits := base.Bits() + r.IntN(base.Addr().BitLen()-base.Bits()+1)
					list = append(list, netip.PrefixFrom(random(), bits).Masked())
				}
				if r.IntN(8) == 0 {
					list = append(list, netip.PrefixFrom(base.Addr(), 0).Masked())
				}
				who = append(who, list)
			}
			var heard []netip.Addr
			must.Do(t, w.Do(func() (err error) {
				heard, err = hears(sources[0], who, sources)
				return err
			}))
			var want []netip.Addr
			for _, a := range sources {
				in := true
				for _, list := range who {
					in = in && slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
				}
				if in {
					want = append(want, a)
				}
			}
			if !slices.Equal(heard, want) {
				t.Fatalf("audience %v of %v: heard %v, want %v", who, sources, heard, want)
			}
			if len(want) != 0 && len(want) != len(sources) {
				some++
			}
		}
		if some < 10 {
			t.Errorf("%s: only %d audiences were some of the sources", base, some)
		}
	}
}

// hears returns which of the sources a socket with this audience hears.
func hears(at netip.Addr, who audience, sources []netip.Addr) ([]netip.Addr, error) {
	lc := net.ListenConfig{Control: control(at, who)}
	l, err := lc.ListenPacket(context.Background(), "udp", netip.AddrPortFrom(at, 0).String())
	if err != nil {
		return nil, err
	}
	defer l.Close()
	c := l.(*net.UDPConn)
	send := func(from netip.Addr, text string) error {
		d := net.Dialer{
			LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
			Control:   control(from, nil),
		}
		conn, err := d.Dial("udp", c.LocalAddr().String())
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write([]byte(text))
		return err
	}
	for _, from := range sources {
		// A sender that is not heard may get EPERM.
		if err := send(from, "x"); err != nil && !errors.Is(err, unix.EPERM) {
			return nil, err
		}
	}
	// All accepted datagrams are queued by now. This one is the last.
	if err := setAudience(c, at, nil); err != nil {
		return nil, err
	}
	if err := send(at, "end"); err != nil {
		return nil, err
	}
	var out []netip.Addr
	buf := make([]byte, 10)
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return nil, err
		}
		if string(buf[:n]) == "end" {
			return out, nil
		}
		out = append(out, from.Addr().Unmap())
	}
}

// TestSocketWithoutFilterAnswersAll uses an audience that is too large for a filter.
func TestSocketWithoutFilterAnswersAll(t *testing.T) {
	t.Parallel()
	var list []netip.Prefix
	for i := range 2000 {
		list = append(list, single(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})))
	}
	if got := filter(false, audience{list[:1000]}); len(got) != 4*1000+2 {
		t.Errorf("%d instructions for 1000 prefixes", len(got))
	}
	if got := filter(false, audience{list}); got != nil {
		t.Errorf("%d instructions for 2000 prefixes, want none", len(got))
	}
	w, port := newWorld(t, Config{}), freePort(t, "tcp")
	w.service("web", tcp, port)
	w.endpoints("web", tcp, serveTCP(t, "a"))
	w.sync()
	for bi := range w.backend.bindings {
		s := w.backend.bindings[bi].socket
		for _, l := range [][]netip.Prefix{list, list[:1000]} {
			if err := setAudience(s, localhost, audience{l}); err != nil {
				t.Error(err)
			}
		}
	}
}
