//go:build linux

package nft

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Conn is a netlink socket to nf_tables of one network namespace. It is not safe
// for concurrent use.
type Conn struct {
	*nfnl.Conn
	limit   int
	commits uint32
	// Refusal, if not nil, makes the error of a refused request.
	Refusal func(*nfnl.Error) error
}

// Dial opens a socket as [nfnl.Dial] does, and requests a send buffer of the given size.
func Dial(ns *os.File, sendBuffer int) (*Conn, error) {
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return nil, err
	}
	c := &Conn{Conn: conn}
	if c.limit, err = conn.SetBuffers(sendBuffer, 8<<20); err != nil {
		conn.Close()
		return nil, err
	}
	return c, nil
}

// Limit is the largest batch, in bytes, that the socket can send.
func (c *Conn) Limit() int { return c.limit }

// Commits returns how many transactions this connection has committed. Each adds
// one to [Conn.Generation].
func (c *Conn) Commits() uint32 { return c.commits }

// Commit sends the batch and returns once the kernel has committed or refused all of it. If the kernel refused it,
// the error is an [*nfnl.Error]. An empty batch is not sent.
func (c *Conn) Commit(b *Batch) error {
	if b.Len()+controlSize > c.limit {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, b.Len()+controlSize, c.limit)
	}
	sent := !b.Empty()
	if err := c.Conn.Commit(&b.Batch); err != nil {
		return c.refusal(err)
	}
	if sent {
		c.commits++
	}
	return nil
}

// controlSize is the length of the message that ends a batch, in bytes.
const controlSize = 20

// Get sends one request of an nf_tables type and calls fn with the attributes of
// each object of the answer. With dump it requests all objects.
func (c *Conn) Get(typ uint16, family byte, dump bool, attrs []byte, fn func(attrs []byte) error) error {
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: typ, Family: family, Dump: dump, Attrs: attrs}
	return c.refusal(c.Conn.Get(context.Background(), r, fn))
}

// refusal replaces a refusal by the result of Refusal. It returns other errors as they are.
func (c *Conn) refusal(err error) error {
	if refused, ok := err.(*nfnl.Error); ok && c.Refusal != nil {
		return c.Refusal(refused)
	}
	return err
}

// Generation returns the number of transactions that any process has committed in
// the network namespace so far.
func (c *Conn) Generation() (uint32, error) {
	var gen uint32
	err := c.Get(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, false, nil, func(attrs []byte) error {
		a := parse(attrs)
		gen = a.number(unix.NFTA_GEN_ID)
		return nil
	})
	return gen, err
}
