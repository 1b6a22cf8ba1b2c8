package nfnl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// generation is a request that any kernel with nf_tables answers.
var generation = Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETGEN}

func dial(t *testing.T, h *netlab.Host) *Conn {
	t.Helper()
	c := must.Get(Dial(h.File()))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

func TestSocketWorksAfterErrors(t *testing.T) {
	c := dial(t, netlab.NewHost(t))
	objects := 0
	if err := c.Get(t.Context(), generation, func([]byte) error { objects++; return nil }); err != nil || objects != 1 {
		t.Fatalf("%d objects, error %v", objects, err)
	}
	if c.unread {
		t.Error("the next exchange looks for answers although all were read")
	}
	// After a refusal, which has the kernel's number, the socket works.
	missing := Request{
		Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETTABLE, Family: unix.NFPROTO_IPV4,
		Attrs: AppendString(nil, unix.NFTA_TABLE_NAME, "none"),
	}
	var refused *Error
	if err := c.Get(t.Context(), missing, nil); !errors.As(err, &refused) || refused.Errno != unix.ENOENT {
		t.Errorf("missing table: %v", err)
	}
	// It also works after an exchange that its caller abandoned.
	failure := errors.New("failure")
	if err := c.Get(t.Context(), generation, func([]byte) error { return failure }); err != failure {
		t.Errorf("abandoned: %v", err)
	}
	if !c.unread {
		t.Error("the next exchange ignores the answers that are left")
	}
	if err := c.Get(t.Context(), generation, func([]byte) error { objects++; return nil }); err != nil || objects != 2 {
		t.Errorf("after an abandoned exchange: %d objects, error %v", objects, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Get(ended, generation, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}

// TestCommitReadsAllAnswers commits after a dump that its caller abandoned: the kernel continues the dump as
// it is read, behind the acknowledgment of the transaction. It also commits after a refusal.
func TestCommitReadsAllAnswers(t *testing.T) {
	c := dial(t, netlab.NewHost(t))
	write := func(typ uint16, names ...string) error {
		b := &Batch{}
		b.Reset()
		for _, name := range names {
			addTable(b, typ, name)
		}
		return c.Commit(b)
	}
	silent := func(after string) {
		t.Helper()
		if left, err := c.Receive(unix.MSG_DONTWAIT); err != unix.EAGAIN {
			t.Errorf("after %s: %d bytes of answers are left, error %v", after, len(left), err)
		}
	}
	var names []string
	for i := range 2000 {
		names = append(names, fmt.Sprintf("table-%d", i))
	}
	must.Do(t, write(unix.NFT_MSG_NEWTABLE, names...))
	silent("a transaction")
	failure := errors.New("failure")
	dump := Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETTABLE, Family: unix.NFPROTO_IPV4, Dump: true}
	if err := c.Get(t.Context(), dump, func([]byte) error { return failure }); err != failure {
		t.Fatal(err)
	}
	must.Do(t, write(unix.NFT_MSG_NEWTABLE, "after"))
	silent("a transaction after an abandoned dump")
	var refused *Error
	if err := write(unix.NFT_MSG_DELTABLE, "none", "after", "none"); !errors.As(err, &refused) || refused.Errno != unix.ENOENT {
		t.Errorf("two tables that do not exist: %v", err)
	}
	silent("two refusals")
}

// TestEmptySocketMakesNoError reads a socket without datagrams, as Commit does after a refusal. The one
// allocation is that of recvmsg.
func TestEmptySocketMakesNoError(t *testing.T) {
	c := dial(t, netlab.NewHost(t))
	if n := testing.AllocsPerRun(100, func() {
		if _, err := c.Receive(unix.MSG_DONTWAIT); err != unix.EAGAIN {
			t.Fatal(err)
		}
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

func TestClosedSocketIsReported(t *testing.T) {
	h := netlab.NewHost(t)
	get := func(c *Conn) error {
		return c.Get(t.Context(), generation, func([]byte) error { return nil })
	}
	c := dial(t, h)
	for range 2 {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := get(c); !errors.Is(err, os.ErrClosed) || !c.Closed() {
		t.Errorf("after Close: %v", err)
	}
}

func TestDialRejectsFileOfNoNamespace(t *testing.T) {
	null := must.Get(os.Open(os.DevNull))(t)
	defer null.Close()
	if c, err := Dial(null); err == nil {
		c.Close()
		t.Error("no error for a file that is not a network namespace")
	}
}
