package nfnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
)

// Lengths, types and flags of messages (include/uapi/linux/netlink.h).
const (
	headerLen = 16 // struct nlmsghdr
	genLen    = 4  // struct nfgenmsg

	typeError = 2 // NLMSG_ERROR
	typeDone  = 3 // NLMSG_DONE

	flagRequest     = 0x1   // NLM_F_REQUEST
	flagAck         = 0x4   // NLM_F_ACK
	flagInterrupted = 0x10  // NLM_F_DUMP_INTR
	flagDump        = 0x300 // NLM_F_DUMP

	attrMessage = 1 // NLMSGERR_ATTR_MSG
)

var (
	// ErrInterrupted is wrapped by the error of a dump during which the kernel's
	// objects changed. The dump may mix the states before and after the change.
	ErrInterrupted = errors.New("dump was interrupted by a change")
	// ErrMalformed is wrapped by errors about an answer that is not a sequence of
	// netlink messages.
	ErrMalformed = errors.New("malformed netlink message")
)

// Error is the kernel's refusal of a request.
type Error struct {
	// Errno is the kernel's error number.
	Errno syscall.Errno
	// What names the object that was refused, "" if the caller named none.
	What string
	// Message is the kernel's explanation from its extended acknowledgement. It is
	// often "".
	Message string
}

// Error returns all fields in one line.
func (e *Error) Error() string {
	s := e.Errno.Error()
	if e.Message != "" {
		s += " (" + e.Message + ")"
	}
	if e.What != "" {
		return e.What + ": " + s
	}
	return s
}

// Unwrap returns the error number, for errors.Is.
func (e *Error) Unwrap() error { return e.Errno }

// Begin appends the headers of a request to b. The caller appends attributes and then calls End with the length that
// b had before. subsystem is NFNL_SUBSYS_*, typ is the subsystem's own number, flags are NLM_F_* in addition to
// NLM_F_REQUEST, and family is NFPROTO_*.
func Begin(b []byte, subsystem, typ, flags uint16, seq uint32, family uint8) []byte {
	return begin(b, subsystem<<8|typ, flags, seq, family, 0)
}

// BeginControl appends the headers of a message about a batch (NFNL_MSG_BATCH_*) of
// requests to a subsystem.
func BeginControl(b []byte, typ uint16, seq uint32, subsystem uint16) []byte {
	return begin(b, typ, 0, seq, 0, subsystem)
}

func begin(b []byte, typ, flags uint16, seq uint32, family uint8, resource uint16) []byte {
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags|flagRequest)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0) // the kernel fills in the port
	b = append(b, family, 0)                   // NFNETLINK_V0
	return binary.BigEndian.AppendUint16(b, resource)
}

// End sets the length of the message at start.
func End(b []byte, start int) {
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
}

// Acknowledge requests an acknowledgement of the message at start.
func Acknowledge(b []byte, start int) {
	flags := binary.NativeEndian.Uint16(b[start+6:])
	binary.NativeEndian.PutUint16(b[start+6:], flags|flagAck)
}

// Message is one message of an answer. Its body is part of the buffer that Next read.
type Message struct {
	// Type is the subsystem, shifted left by 8, plus the subsystem's own number, or a
	// netlink control type.
	Type  uint16
	Flags uint16
	Seq   uint32
	// Body is the message without its netlink header.
	Body []byte
}

// Next splits the first message off b.
func Next(b []byte) (m Message, rest []byte, err error) {
	if len(b) < headerLen {
		return m, nil, fmt.Errorf("%w: %d bytes left", ErrMalformed, len(b))
	}
	n := binary.NativeEndian.Uint32(b)
	if n < headerLen || uint64(n) > uint64(len(b)) {
		return m, nil, fmt.Errorf("%w: length %d of %d bytes", ErrMalformed, n, len(b))
	}
	m = Message{
		Type:  binary.NativeEndian.Uint16(b[4:]),
		Flags: binary.NativeEndian.Uint16(b[6:]),
		Seq:   binary.NativeEndian.Uint32(b[8:]),
		Body:  b[headerLen:n],
	}
	return m, b[min(len(b), Align(int(n))):], nil
}

// Last reports whether the message is the last answer to its request: an
// acknowledgement, a refusal, or the end of a dump.
func (m Message) Last() bool { return m.Type == typeError || m.Type == typeDone }

// Acknowledges reports whether the message is an acknowledgement or a refusal.
func (m Message) Acknowledges() bool { return m.Type == typeError }

// Attrs returns the attributes of a subsystem's message, nil if it has none.
func (m Message) Attrs() []byte {
	if m.Last() || len(m.Body) < genLen {
		return nil
	}
	return m.Body[genLen:]
}

// Err returns the refusal, an [*Error], that the message reports, or nil.
func (m Message) Err() error {
	switch {
	case !m.Last():
		return nil
	case len(m.Body) >= 4:
		if n := int32(binary.NativeEndian.Uint32(m.Body)); n != 0 {
			return &Error{Errno: syscall.Errno(-n), Message: m.explanation()}
		}
	case m.Type == typeError:
		return fmt.Errorf("%w: error without a number", ErrMalformed)
	}
	return nil
}

// explanation returns the text of an extended acknowledgement, behind the error number and, if that is not the end of
// a dump, the header of the refused message (NETLINK_CAP_ACK).
func (m Message) explanation() string {
	skip := 4
	if m.Type == typeError {
		skip += headerLen
	}
	for typ, data := range Attributes(m.Body[min(skip, len(m.Body)):]) {
		if typ == attrMessage {
			return String(data)
		}
	}
	return ""
}

// Request is a request for one object or, with Dump, for all objects of a kind.
type Request struct {
	Subsystem, Type uint16
	Family          uint8
	// Flags are NLM_F_* in addition to the flags of an acknowledgement or a dump.
	Flags uint16
	Dump  bool
	// Attrs are the encoded attributes.
	Attrs []byte
}

// attempts is how often a dump is read at most while changes interrupt it.
const attempts = 10

// Again calls read, and calls it again while its error wraps [ErrInterrupted], until ctx ends and at
// most ten times in all. It returns the error of the last call, or of ctx.
func Again(ctx context.Context, read func() error) error {
	_, err := Whole(ctx, ErrInterrupted, func() (struct{}, error) { return struct{}{}, read() })
	return err
}

// Whole is Again for a function that returns what it has read, and for the error of another library
// that means that the dump was interrupted.
func Whole[T any](ctx context.Context, interrupted error, read func() (T, error)) (out T, err error) {
	for range attempts {
		if err := ctx.Err(); err != nil {
			return out, err
		}
		if out, err = read(); !errors.Is(err, interrupted) {
			break
		}
	}
	return out, err
}
