//go:build linux

package nlbatch

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Conn is a netlink socket to nf_tables of one network namespace. It is not safe
// for concurrent use.
type Conn struct {
	*nfnl.Conn
	limit int
	// commits counts the transactions that were committed.
	commits uint32
}

// wantBuffer is the size of the send buffer to request, enough for a transaction of
// a million elements. The kernel allocates memory only as needed.
const wantBuffer = 256 << 20

// Dial opens a socket as [nfnl.Dial] does.
func Dial(ns *os.File) (*Conn, error) {
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return nil, err
	}
	c := &Conn{Conn: conn}
	if c.limit, err = conn.SetBuffers(wantBuffer, 8<<20); err != nil {
		conn.Close()
		return nil, err
	}
	return c, nil
}

// Limit is the largest batch, in bytes, that the socket can send.
func (c *Conn) Limit() int { return c.limit }

// SetLimit changes the limit, so that tests need no large batches. A limit above the
// original one has no effect on what the socket can send.
func (c *Conn) SetLimit(bytes int) { c.limit = bytes }

// Commits returns how many transactions this connection has committed. Each adds
// one to [Conn.Generation].
func (c *Conn) Commits() uint32 { return c.commits }

// Commit sends the batch and returns once the kernel has committed or refused all of
// it. If the kernel refused it, the error is an [*nfnl.Error]. An empty batch is not
// sent.
func (c *Conn) Commit(b *Batch) error {
	if b.Empty() && !c.Closed() {
		return nil
	}
	last := b.seq - 1
	b.finish()
	if len(b.buf) > c.limit {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(b.buf), c.limit)
	}
	if err := c.Send(b.buf); err != nil {
		return err
	}
	// The kernel has processed the batch, and its answers are waiting. Commit reads all
	// of them, so that the next batch does not get an old answer, even if the socket
	// could not hold all refusals.
	var failed *nfnl.Error
	acked, lost := false, false
	for {
		answers, err := c.Receive(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			if failed != nil {
				return failed
			}
			if lost || !acked {
				return fmt.Errorf("netlink: the kernel did not acknowledge the transaction: %w", unix.ENOBUFS)
			}
			c.commits++
			return nil
		case errors.Is(err, unix.ENOBUFS):
			lost = true
			continue
		case err != nil:
			return err
		}
		for len(answers) > 0 {
			var m nfnl.Message
			if m, answers, err = nfnl.Next(answers); err != nil {
				return err
			}
			if !m.Acknowledges() {
				continue
			}
			err := m.Err()
			var refusal *nfnl.Error
			switch {
			case err == nil && m.Seq == last:
				acked = true
			case errors.As(err, &refusal) && failed == nil:
				refusal.What = b.what(m.Seq)
				failed = refusal
			}
		}
	}
}

// Get sends one request of an nf_tables type and calls fn with the attributes of
// each object of the answer. With dump it requests all objects.
func (c *Conn) Get(typ uint16, family byte, dump bool, attrs []byte, fn func(attrs []byte) error) error {
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: typ, Family: family, Dump: dump, Attrs: attrs}
	return c.Conn.Get(context.Background(), r, fn)
}

// Generation returns the number of transactions that any process has committed in
// the network namespace so far.
func (c *Conn) Generation() (uint32, error) {
	var gen uint32
	err := c.Get(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, false, nil, func(attrs []byte) error {
		for typ, data := range nfnl.Attributes(attrs) {
			if typ == unix.NFTA_GEN_ID {
				gen = nfnl.Uint32(data)
			}
		}
		return nil
	})
	return gen, err
}
