package nfacct

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// MaxName is how many bytes a name may have: NFACCT_NAME_MAX of the kernel's
// linux/netfilter/nfnetlink_acct.h, less the NUL.
const MaxName = 31

// Object is an accounting object.
type Object struct {
	Name string
	// Packets and Bytes is what it has counted since it was made.
	Packets, Bytes uint64

	quota bool
}

// Constants are from linux/netlink.h, linux/netfilter/nfnetlink.h and
// linux/netfilter/nfnetlink_acct.h of the kernel.
const (
	subsystem = 7 // NFNL_SUBSYS_ACCT

	msgNew    = 0 // NFNL_MSG_ACCT_NEW
	msgGet    = 1 // NFNL_MSG_ACCT_GET
	msgDelete = 3 // NFNL_MSG_ACCT_DEL

	attrName    = 1 // NFACCT_NAME
	attrPackets = 2 // NFACCT_PKTS, in the network's byte order, as all numbers
	attrBytes   = 3 // NFACCT_BYTES
	attrFlags   = 5 // NFACCT_FLAGS, there if the object has a quota

	flagRequest = 1 // NLM_F_REQUEST
	flagAck     = 4 // NLM_F_ACK

	headerLen = 16     // struct nlmsghdr
	genLen    = 4      // struct nfgenmsg
	attrLen   = 4      // struct nlattr
	typeMask  = 0x3fff // NLA_TYPE_MASK
)

var errShort = errors.New("an answer is too short")

// message returns a request about the object of a name, which is to be acknowledged.
func message(kind, flags uint16, seq uint32, name string) ([]byte, error) {
	if name == "" || len(name) > MaxName || bytes.IndexByte([]byte(name), 0) >= 0 {
		return nil, fmt.Errorf("nfacct: name %q is not 1 to %d bytes other than NUL", name, MaxName)
	}
	native := binary.NativeEndian
	size := headerLen + genLen + attrLen + (len(name)+1+3)/4*4
	b := make([]byte, 0, size)
	b = native.AppendUint32(b, uint32(size))
	b = native.AppendUint16(b, subsystem<<8|kind)
	b = native.AppendUint16(b, flagRequest|flagAck|flags)
	b = native.AppendUint32(b, seq)
	b = native.AppendUint32(b, 0)          // the kernel knows who asks
	b = append(b, make([]byte, genLen)...) // no family, NFNETLINK_V0, no resource
	b = native.AppendUint16(b, uint16(attrLen+len(name)+1))
	b = native.AppendUint16(b, attrName)
	b = append(b, name...)
	return b[:size], nil
}

// parse reads an object, from behind the message's header.
func parse(b []byte) (Object, error) {
	var o Object
	if len(b) < genLen {
		return o, errShort
	}
	for b = b[genLen:]; len(b) >= attrLen; {
		n, kind := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])&typeMask
		if n < attrLen || n > len(b) {
			return o, errShort
		}
		value := b[attrLen:n]
		b = b[min((n+3)/4*4, len(b)):]
		switch kind {
		case attrName:
			name, _, _ := bytes.Cut(value, []byte{0})
			o.Name = string(name)
		case attrPackets, attrBytes:
			if len(value) != 8 {
				return o, errShort
			}
			if kind == attrPackets {
				o.Packets = binary.BigEndian.Uint64(value)
			} else {
				o.Bytes = binary.BigEndian.Uint64(value)
			}
		case attrFlags:
			o.quota = true
		}
	}
	return o, nil
}
