//go:build linux

package nlbatch

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrInterrupted is in the error of a dump during which a transaction was
// committed: what it gave may be neither the old state nor the new.
var ErrInterrupted = errors.New("dump was interrupted by a change")

// Get sends one request of an nf_tables type with the attributes in attrs and
// calls fn with the attributes of each message of the answer. With dump it asks
// for all objects (NLM_F_DUMP). A missing object is an [*Error] with ENOENT.
func (c *Conn) Get(typ uint16, family byte, dump bool, attrs []byte, fn func(attrs []byte) error) error {
	var b Batch
	c.seq++
	flags := uint16(unix.NLM_F_ACK)
	if dump {
		flags = unix.NLM_F_DUMP
	}
	b.seq = c.seq
	b.Begin(typ, flags, family)
	b.buf = append(b.buf, attrs...)
	b.End()
	if err := c.send(b.buf); err != nil {
		return err
	}
	var result error
	interrupted := false
	for {
		msg, err := c.receive(0)
		if err != nil {
			return err
		}
		for len(msg) >= unix.NLMSG_HDRLEN {
			n := int(binary.NativeEndian.Uint32(msg))
			if n < unix.NLMSG_HDRLEN || n > len(msg) {
				return errors.New("netlink: malformed answer")
			}
			typ, flags := binary.NativeEndian.Uint16(msg[4:]), binary.NativeEndian.Uint16(msg[6:])
			mine := binary.NativeEndian.Uint32(msg[8:]) == c.seq
			body := msg[unix.NLMSG_HDRLEN:n]
			interrupted = interrupted || mine && flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case !mine: // left over from a request that was given up
			case typ == unix.NLMSG_ERROR || typ == unix.NLMSG_DONE:
				if len(body) >= 4 {
					if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(body))); errno != 0 {
						return &Error{Errno: errno, Message: extendedAck(msg[:n])}
					}
				}
				if result == nil && interrupted {
					result = fmt.Errorf("netlink: %w", ErrInterrupted)
				}
				return result
			case len(body) >= 4 && result == nil:
				result = fn(body[4:]) // behind the nfgenmsg
			}
			msg = msg[min(align(n), len(msg)):]
		}
	}
}

// Attributes calls fn with the type, without flags, and payload of each
// attribute in buf, and stops at the first malformed one.
func Attributes(buf []byte, fn func(typ uint16, data []byte)) {
	for len(buf) >= 4 {
		n, typ := int(binary.NativeEndian.Uint16(buf)), binary.NativeEndian.Uint16(buf[2:])
		if n < 4 || n > len(buf) {
			return
		}
		fn(typ&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), buf[4:n])
		buf = buf[min(align(n), len(buf)):]
	}
}

// Generation returns the number of transactions committed in the network
// namespace so far, by anybody.
func (c *Conn) Generation() (uint32, error) {
	var gen uint32
	err := c.Get(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, false, nil, func(attrs []byte) error {
		Attributes(attrs, func(typ uint16, data []byte) {
			if typ == unix.NFTA_GEN_ID && len(data) == 4 {
				gen = binary.BigEndian.Uint32(data)
			}
		})
		return nil
	})
	return gen, err
}
