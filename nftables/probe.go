//go:build linux

package nftables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// minimumKernel is the oldest kernel release that the tests run in (.ci/kernels). Only errors
// use it, because probe tries the features themselves.
const minimumKernel = "Linux 5.10"

// mark returns the packet mark that requests masquerading.
func (b *Backend) mark() uint32 { return uint32(b.config.MasqueradeMark) }

// probe makes the kernel check, for each family, a transaction that creates a table with every
// kind of set, chain and rule, and deletes the table. The objects and rules of Config.Offload
// are in a transaction of their own, so that the error can name the feature.
func (b *Backend) probe() error {
	for _, f := range b.config.Families {
		if err := b.probeTable(f, nil); err != nil {
			return err
		}
		if b.config.Offload == nil {
			continue
		}
		err := b.probeTable(f, b.config.Offload)
		var missing *ruleset.UnsupportedError
		if errors.As(err, &missing) {
			missing.Feature = "offload by flowtables (CONFIG_NFT_FLOW_OFFLOAD, CONFIG_NF_FLOW_TABLE_INET, and in Linux 5.10 CONFIG_NF_FLOW_TABLE_IPV4 and _IPV6): " + missing.Feature
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *Backend) probeTable(f tracker.Family, offload *Offload) error {
	w := newWriter(probeTable)
	t := newTable(f, &ruleset.Node{LocalTraffic: ruleset.LocalTraffic{InterfacePrefix: "veth"}}, b.mark(), b.limits)
	t.offload = offload
	t.measure(nil, b.config.StickyClients, 0)
	w.newTable(f, unix.NLM_F_EXCL)
	t.skeleton(w)
	for h := handleNotPods; h <= handleDrop; h++ {
		c := handler{handling: h, firewall: true}
		if h < handleInternalOrDrop {
			c.buckets = exactBuckets + 4
		}
		t.handler(c, w)
	}
	t.internalHandler(handler{sticky: true}, w)
	t.stickyHandler(stickyHandler{buckets: exactBuckets + 4, seconds: 10800}, w)
	t.handler(handler{buckets: 251, hash: tracker.HashSourcePort}, w)
	t.prefix(f.Bits()/2, w)
	batch, err := w.finish()
	if err != nil {
		return fmt.Errorf("nftables: cannot probe kernel: %w", err)
	}
	w.deleteTable(f)
	if err := b.conn.Commit(batch); err != nil {
		return unsupported(f, err)
	}
	return nil
}

// unsupported returns the error of probing a family: a [*ruleset.UnsupportedError] unless
// the kernel refused for a temporary reason.
func unsupported(f tracker.Family, err error) error {
	var refused *nfnl.Error
	if !errors.As(err, &refused) {
		return fmt.Errorf("nftables: cannot probe kernel: %w", err)
	}
	e := &ruleset.UnsupportedError{Backend: "nftables", Family: f, Feature: refused.What, Minimum: minimumKernel, Err: err}
	switch refused.Errno {
	case unix.ENOMEM, unix.ENOBUFS, unix.EAGAIN, unix.EINTR, unix.EBUSY, unix.EEXIST, unix.EMFILE, unix.ENFILE:
		return fmt.Errorf("nftables: cannot probe kernel: %s: %w", f, err)
	case unix.EPERM:
		e.Feature, e.Minimum = "programming without CAP_NET_ADMIN in the network namespace's user namespace", ""
	}
	return e
}

// dial returns c with defaults, and a socket in its network namespace.
func (c Config) dial() (Config, *nlbatch.Conn, error) {
	c, err := c.withDefaults()
	if err != nil {
		return c, nil, err
	}
	conn, err := nlbatch.Dial(c.NetNS)
	if err != nil {
		return c, nil, unsupportedSocket(err)
	}
	return c, conn, nil
}

// unsupportedSocket returns the error of opening a socket: a
// [*ruleset.UnsupportedError] if the kernel has no such sockets or does not allow them.
func unsupportedSocket(err error) error {
	for _, errno := range []unix.Errno{unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EPERM, unix.EACCES} {
		if errors.Is(err, errno) {
			return &ruleset.UnsupportedError{Backend: "nftables", Feature: "an nfnetlink socket", Err: err}
		}
	}
	return fmt.Errorf("nftables: %w", err)
}
