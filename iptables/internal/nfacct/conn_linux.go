package nfacct

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// maxName is NFACCT_NAME_MAX of include/uapi/linux/netfilter/nfnetlink_acct.h, less the NUL.
const maxName = 31

// Message types and attributes (include/uapi/linux/netfilter/nfnetlink_acct.h).
const (
	msgNew    = 0 // NFNL_MSG_ACCT_NEW
	msgGet    = 1 // NFNL_MSG_ACCT_GET
	msgDelete = 3 // NFNL_MSG_ACCT_DEL

	attrName    = 1 // NFACCT_NAME
	attrPackets = 2 // NFACCT_PKTS, big-endian
	attrBytes   = 3 // NFACCT_BYTES, big-endian
	attrFlags   = 5 // NFACCT_FLAGS, present if the object has a quota
)

// Object is an accounting object.
type Object struct {
	Name string
	// Packets and Bytes are counted from the creation of the object.
	Packets, Bytes uint64

	quota bool
}

// Conn is a connection to the accounting objects of one network namespace. Its methods may be called concurrently. A
// refusal by the kernel is a [unix.Errno]: EINVAL or EOPNOTSUPP if the kernel has no accounting objects, EPERM
// without CAP_NET_ADMIN. After Close, other methods return [os.ErrClosed].
type Conn struct {
	mu   sync.Mutex
	conn *nfnl.Conn
}

// Dial opens a connection in a network namespace, as [nfnl.Dial].
func Dial(ns *os.File) (*Conn, error) {
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return nil, fmt.Errorf("nfacct: %w", err)
	}
	return &Conn{conn: conn}, nil
}

// Close closes the connection. Closing a closed connection does nothing.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn.Close()
}

// Add creates an object that has counted nothing, unless the object exists already. It fails if the existing object
// has a quota, which only other programs use.
func (c *Conn) Add(name string) error {
	_, err := c.request(msgNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, name)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	o, err := c.Get(name)
	if err == nil && o.quota {
		err = fmt.Errorf("nfacct: %s has a quota", name)
	}
	return err
}

// Get returns an object. The error is ENOENT if no object has that name.
func (c *Conn) Get(name string) (Object, error) {
	o, err := c.request(msgGet, 0, name)
	if err == nil && o.Name != name {
		err = fmt.Errorf("nfacct: %s: the kernel's answer has no such object", name)
	}
	return o, err
}

// Delete deletes an object. The error is EBUSY if a rule counts into it, and ENOENT if
// no object has that name.
func (c *Conn) Delete(name string) error {
	_, err := c.request(msgDelete, 0, name)
	return err
}

// request sends a request about an object and returns the object of the answer, if any.
func (c *Conn) request(kind, flags uint16, name string) (o Object, err error) {
	if name == "" || len(name) > maxName || strings.ContainsRune(name, 0) {
		return o, fmt.Errorf("nfacct: name %q is not 1 to %d bytes other than NUL", name, maxName)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_ACCT, Type: kind, Flags: flags, Attrs: nfnl.AppendString(nil, attrName, name)}
	if err := c.conn.Get(context.Background(), r, func(attrs []byte) error { o = parse(attrs); return nil }); err != nil {
		return o, fmt.Errorf("nfacct: %s: %w", name, err)
	}
	return o, nil
}

// parse reads an object from the attributes of an answer.
func parse(attrs []byte) (o Object) {
	for typ, value := range nfnl.Attributes(attrs) {
		switch typ {
		case attrName:
			o.Name = nfnl.String(value)
		case attrPackets:
			o.Packets = nfnl.Uint64(value)
		case attrBytes:
			o.Bytes = nfnl.Uint64(value)
		case attrFlags:
			o.quota = true
		}
	}
	return o
}
