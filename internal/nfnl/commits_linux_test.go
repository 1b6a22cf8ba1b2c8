package nfnl

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// addTable adds a message of a type about a table to a transaction.
func addTable(b *Batch, typ uint16, name string) {
	b.Begin(typ, unix.NLM_F_CREATE, unix.NFPROTO_IPV4)
	b.String(unix.NFTA_TABLE_NAME, name)
	b.End()
}

// commit commits a transaction of two objects.
func commit(t *testing.T, h *netlab.Host) {
	t.Helper()
	c := must.Get(Dial(h.File()))(t)
	defer c.Close()
	b := &Batch{}
	b.Reset()
	addTable(b, unix.NFT_MSG_NEWTABLE, "other")
	addTable(b, unix.NFT_MSG_DELTABLE, "other")
	must.Do(t, c.Commit(b))
}

func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(testtime.Timeout); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// TestCheckFollowsTransactions counts the calls of check: none without a transaction, and one
// after each transaction for which WatchCommits was listening.
func TestCheckFollowsTransactions(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	var calls atomic.Int32
	done := make(chan error, 1)
	failure := errors.New("failure")
	go func() {
		done <- WatchCommits(ctx, h.File(), time.Millisecond, func(context.Context) error {
			calls.Add(1)
			return failure
		}, func(err error) {
			if err != failure {
				t.Error(err)
			}
		})
	}()
	began := time.Now()
	const transactions = 3
	for i := range int32(transactions) {
		waitFor(t, "check was not called", func() bool { return calls.Load() > i })
		time.Sleep(20 * time.Millisecond) // until it listens
		commit(t, h)
	}
	waitFor(t, "check was not called", func() bool { return calls.Load() > transactions })
	time.Sleep(100 * time.Millisecond)
	// A transaction may cause a call immediately and another after the interval.
	if n := calls.Load(); n > 2*transactions+1+int32(time.Since(began)/quietInterval) {
		t.Errorf("%d calls after %d transactions", n, transactions)
	}
	over := errors.New("over")
	cancel(over)
	if err := <-done; err != over {
		t.Error(err)
	}
}

// TestListenerReturnsForEveryReason waits for a notification, for lost notifications and for the
// end of the context.
func TestListenerReturnsForEveryReason(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	l := must.Get(listen(h.File()))(t)
	defer l.close()
	must.Do(t, l.member(unix.NETLINK_ADD_MEMBERSHIP))
	quiet := func(what string, ctx context.Context, want bool) {
		t.Helper()
		if got, err := l.quiet(ctx); err != nil || got != want {
			t.Errorf("%s: quiet is %t, want %t; error %v", what, got, want, err)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	quiet("context ended", ended, true)
	for range 2 {
		commit(t, h)
		quiet("transaction", t.Context(), false)
		quiet("all was read", ended, true)
	}
	must.Do(t, unix.SetsockoptInt(l.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1))
	lose := func() {
		for range 20 {
			commit(t, h)
		}
	}
	lose()
	lost := false
	for {
		_, err := l.Receive(unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		lost = lost || errors.Is(err, unix.ENOBUFS)
	}
	if !lost {
		t.Error("no notification was lost")
	}
	lose()
	quiet("lost notifications", t.Context(), false)
	quiet("all was read", ended, true)
}
