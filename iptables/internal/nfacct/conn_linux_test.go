package nfacct

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// dial connects to the accounting objects of a namespace, if the kernel has any.
func dial(t *testing.T, h *netlab.Host) *Conn {
	t.Helper()
	c, err := Dial(h.File())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_, err = c.Get("probe")
	netlab.Need(t, errors.Is(err, unix.ENOENT), "accounting objects (CONFIG_NETFILTER_NETLINK_ACCT)")
	return c
}

// TestObjectsAreCreatedReadAndDeleted uses objects of one namespace. Rules of iptables count
// into one of them.
func TestObjectsAreCreatedReadAndDeleted(t *testing.T) {
	h, other := netlab.NewHost(t), netlab.NewHost(t)
	c, elsewhere := dial(t, h), dial(t, other)
	long := strings.Repeat("x", maxName)
	for _, name := range []string{"a", "abc", "with blanks", long} {
		for range 2 {
			if err := c.Add(name); err != nil {
				t.Errorf("add %q: %v", name, err)
			}
		}
		if o, err := c.Get(name); err != nil || o != (Object{Name: name}) {
			t.Errorf("%+v, error %v", o, err)
		}
		if _, err := elsewhere.Get(name); !errors.Is(err, unix.ENOENT) {
			t.Errorf("in another namespace: %v", err)
		}
	}
	for _, name := range []string{"", long + "x", "a\x00b"} {
		add := c.Add(name)
		_, get := c.Get(name)
		if del := c.Delete(name); add == nil || get == nil || del == nil {
			t.Errorf("%q: %v, %v, %v", name, add, get, del)
		}
	}

	if out, err := h.Run(t, "iptables-nft", "-A", "OUTPUT", "-p", "udp", "-m", "nfacct", "--nfacct-name", "abc"); err != nil {
		t.Logf("cannot count into an object: %v, %s", err, out)
	} else {
		if err := c.Delete("abc"); !errors.Is(err, unix.EBUSY) {
			t.Errorf("delete an object that a rule counts into: %v", err)
		}
		conn, err := h.Dial(t.Context(), "udp", "", "127.0.0.1:9")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		// 20 bytes of IPv4, 8 of UDP.
		if o, err := c.Get("abc"); err != nil || o != (Object{Name: "abc", Packets: 1, Bytes: 128}) {
			t.Errorf("%+v, error %v", o, err)
		}
	}
	for range 2 {
		err := c.Delete("a")
		if _, gone := c.Get("a"); !errors.Is(gone, unix.ENOENT) {
			t.Errorf("after Delete, error %v, Get returns %v, want ENOENT", err, gone)
		}
	}
}

// TestConnIsSafeForConcurrentUse uses one connection from many goroutines and then closes it.
func TestConnIsSafeForConcurrentUse(t *testing.T) {
	c := dial(t, netlab.NewHost(t))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				if err := c.Add("one"); err != nil {
					t.Error(err)
				}
				if _, err := c.Get("one"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for range 2 {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := c.Get("one"); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// FuzzParse parses arbitrary answers of the kernel.
func FuzzParse(f *testing.F) {
	whole := nfnl.AppendString(nil, attrName, "name")
	whole = nfnl.AppendUint64(whole, attrPackets, 258)
	whole = nfnl.AppendUint64(whole, attrBytes, 1<<56)
	whole = nfnl.AppendUint32(whole, attrFlags, 1)
	for i := range len(whole) + 1 {
		f.Add(whole[:i])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		o := parse(b)
		if want := (Object{Name: "name", Packets: 258, Bytes: 1 << 56, quota: true}); bytes.Equal(b, whole) && o != want {
			t.Errorf("%+v, want %+v", o, want)
		}
	})
}
