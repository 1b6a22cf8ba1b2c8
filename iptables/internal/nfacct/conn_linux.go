package nfacct

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
)

// maxName is the most bytes that a name can have: NFACCT_NAME_MAX of
// include/uapi/linux/netfilter/nfnetlink_acct.h, less the NUL.
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
	// Packets and Bytes are what the object has counted since it was created.
	Packets, Bytes uint64

	quota bool
}

// Conn is a connection to the accounting objects of one network namespace. Its
// methods may be called concurrently. A refusal by the kernel is a [unix.Errno]:
// EINVAL or EOPNOTSUPP if the kernel has no accounting objects, EPERM without
// CAP_NET_ADMIN.
type Conn struct {
	mu   sync.Mutex
	sock *nl.SocketHandle // nil once closed
}

// Dial opens a connection in a network namespace.
func Dial(ns *netns.Namespace) (*Conn, error) {
	c := &Conn{}
	err := ns.Do(func() error {
		s, err := nl.Subscribe(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		c.sock = &nl.SocketHandle{Socket: s}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("nfacct: open netlink socket: %w", err)
	}
	return c, nil
}

// Close closes the connection. Afterwards other methods return [os.ErrClosed], and Close
// does nothing.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sock != nil {
		c.sock.Close()
		c.sock = nil
	}
	return nil
}

// Add creates an object that has counted nothing, unless the object exists already. It
// fails if the existing object has a quota: rules match such an object by whether its
// quota is used up, so it belongs to another program.
func (c *Conn) Add(name string) error {
	_, err := c.request(msgNew, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL, name)
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
	answers, err := c.request(msgGet, unix.NLM_F_ACK, name)
	if err != nil {
		return Object{}, err
	}
	for _, a := range answers {
		if o, ok := parse(a); ok && o.Name == name {
			return o, nil
		}
	}
	return Object{}, fmt.Errorf("nfacct: %s: the kernel's answer has no such object", name)
}

// Delete deletes an object. The error is EBUSY if a rule counts into it, and ENOENT if
// no object has that name.
func (c *Conn) Delete(name string) error {
	_, err := c.request(msgDelete, unix.NLM_F_ACK, name)
	return err
}

// request sends a request about an object and returns the bodies of the answers.
func (c *Conn) request(kind, flags int, name string) ([][]byte, error) {
	if name == "" || len(name) > maxName || bytes.IndexByte([]byte(name), 0) >= 0 {
		return nil, fmt.Errorf("nfacct: name %q is not 1 to %d bytes other than NUL", name, maxName)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sock == nil {
		return nil, fmt.Errorf("nfacct: %w", os.ErrClosed)
	}
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_ACCT<<8|kind, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: c.sock}
	req.AddData(&nl.Nfgenmsg{Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(attrName, nl.ZeroTerminated(name)))
	answers, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.EBADF) {
		err = os.ErrClosed
	}
	if err != nil {
		return nil, fmt.Errorf("nfacct: %s: %w", name, err)
	}
	return answers, nil
}

// parse reads an object from the body of an answer.
func parse(b []byte) (o Object, ok bool) {
	if len(b) < nl.SizeofNfgenmsg {
		return o, false
	}
	for typ, value := range nfnl.Attributes(b[nl.SizeofNfgenmsg:]) {
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
	return o, o.Name != ""
}
