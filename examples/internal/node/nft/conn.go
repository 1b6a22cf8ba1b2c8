//go:build linux

// Package nft reads and writes objects of nf_tables.
package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
)

// timeout bounds the wait for an answer. The kernel answers while the request is sent.
const timeout = 10 * time.Second

// ErrInterrupted is wrapped by the error of a dump during which objects changed.
var ErrInterrupted = errors.New("dump was interrupted by a change")

// Conn is a socket in one network namespace. It must be closed after an error other than the kernel's.
type Conn struct{ *netlink.Conn }

// Dial opens a socket in the namespace that ns is an open file of, or in the calling thread's if ns
// is nil.
func Dial(ns *os.File) (c *Conn, err error) {
	c = &Conn{}
	err = netns.In(ns, func() (err error) {
		c.Conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	return c, err
}

// Request is about one object or, with the flag [netlink.Dump], all objects of a kind.
type Request struct {
	Type   uint16 // NFT_MSG_*
	Family uint8  // NFPROTO_*
	Flags  netlink.HeaderFlags
	Attrs  []netlink.Attribute
}

func (r Request) message() (m netlink.Message, err error) {
	m.Header = netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | netlink.HeaderType(r.Type), Flags: netlink.Request | r.Flags}
	attrs, err := netlink.MarshalAttributes(r.Attrs)
	m.Data = append([]byte{r.Family, unix.NFNETLINK_V0, 0, 0}, attrs...)
	return m, err
}

// Get returns the attributes of each object of an answer. If the objects changed during a dump, the
// error wraps [ErrInterrupted], and the result may mix the states before and after the change.
func (c *Conn) Get(ctx context.Context, r Request) (objects [][]byte, err error) {
	m, err := r.message()
	if err = errors.Join(err, ctx.Err(), c.SetDeadline(time.Now().Add(timeout))); err != nil {
		return nil, err
	}
	list, err := c.Execute(m)
	interrupted := errors.Is(err, unix.EINTR)
	for _, m := range list {
		interrupted = interrupted || m.Header.Flags&netlink.DumpInterrupted != 0
		if len(m.Data) >= 4 {
			objects = append(objects, m.Data[4:])
		}
	}
	if interrupted {
		return objects, fmt.Errorf("netlink: %w", ErrInterrupted)
	}
	return objects, err
}

// Commit sends requests as one transaction and returns once the kernel has committed or refused it.
func (c *Conn) Commit(requests ...Request) error {
	if len(requests) == 0 {
		return nil
	}
	control := func(typ netlink.HeaderType) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: typ, Flags: netlink.Request}, Data: []byte{0, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}}
	}
	list := []netlink.Message{control(unix.NFNL_MSG_BATCH_BEGIN)}
	for i, r := range requests {
		if i == len(requests)-1 {
			r.Flags |= netlink.Acknowledge
		}
		m, err := r.message()
		if err != nil {
			return err
		}
		list = append(list, m)
	}
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := c.SendMessages(append(list, control(unix.NFNL_MSG_BATCH_END))); err != nil {
		return err
	}
	_, err := c.Receive() // the first refusal, or the acknowledgement
	return err
}

// String returns an attribute with a text.
func String(typ uint16, s string) netlink.Attribute {
	return netlink.Attribute{Type: typ, Data: append([]byte(s), 0)}
}

// Uint32 returns an attribute with a number.
func Uint32(typ uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: typ, Data: binary.BigEndian.AppendUint32(nil, n)}
}

// Nested returns an attribute that holds attributes.
func Nested(typ uint16, attrs ...netlink.Attribute) netlink.Attribute {
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		panic(err) // an attribute of more than 64 KiB
	}
	return netlink.Attribute{Type: typ | unix.NLA_F_NESTED, Data: data}
}

// Attributes returns the type, without flags, and the value of each attribute in b. It ends at one
// that is malformed.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		d, err := netlink.NewAttributeDecoder(b)
		for err == nil && d.Next() {
			if !yield(d.Type(), d.Bytes()) {
				return
			}
		}
	}
}

// Uint returns the number that an attribute holds.
func Uint(value []byte) (n uint64) {
	for _, b := range value {
		n = n<<8 | uint64(b)
	}
	return n
}
