//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// backend is the state of a [Backend] on Linux.
type backend struct {
	config Config
	// complaints receives Services that cannot be programmed.
	complaints *complaint.Log

	mu     sync.Mutex
	ns     *netns.Namespace
	tools  map[tracker.Family]*iptool.Tool
	kernel *kernel
	sets   *ipsets
	device *device
	// states holds the kernel's state in each family, or nil while that is unknown. before
	// then holds the last known state, until a full delta is complete.
	states, before []*state
	// rules holds the iptables rules that were last written.
	rules  map[tracker.Family]written
	closed bool
}

// New returns a backend for the network namespace that c names. It opens netlink
// sockets and checks that the system has what the backend needs. It leaves no change. The
// error is a [*ruleset.UnsupportedError] if the system lacks something, and wraps
// [ruleset.ErrConfig] if c is invalid. The first full delta programs the kernel, and
// closing the backend leaves everything in place.
//
// Package github.com/moby/ipvs runs "modprobe ip_vs" once in a process and writes a line to
// standard error if that fails. The failure has no consequence.
func New(ctx context.Context, c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b := newBackend(c)
	if err = b.open(); err == nil {
		err = b.findTools(ctx)
	}
	if err == nil {
		err = b.probe()
	}
	if err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// newBackend returns a Backend without sockets.
func newBackend(c Config) *Backend {
	return &Backend{backend{config: c, complaints: complaint.NewLog(c.Log), rules: map[tracker.Family]written{}}}
}

// open opens the namespace and all sockets in it.
func (b *Backend) open() error {
	if err := b.openOthers(); err != nil {
		return err
	}
	return b.openIPVS()
}

// openOthers opens the namespace and the sockets of ipset and rtnetlink.
func (b *Backend) openOthers() (err error) {
	if b.ns, err = netns.Open(b.config.NetNS); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	err = b.ns.Do(func() (err error) {
		if b.sets, err = dialIPSets(); err != nil {
			return err
		}
		b.device, err = dialDevice(b.config.Device)
		return err
	})
	if err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return nil
}

// openProgrammed returns a Backend with all sockets, to do what it is asked to in a namespace
// that a Backend or kube-proxy has programmed. The error wraps [ruleset.ErrNoRules] if the
// dummy device is missing. Opening the socket of IPVS would then load the module for nothing.
func openProgrammed(c Config, what string) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	b := newBackend(c)
	if err = b.openOthers(); err == nil {
		_, err = b.device.link()
		if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
			err = fmt.Errorf("ipvs: cannot %s: %w", what, ruleset.ErrNoRules)
		} else if err != nil {
			err = fmt.Errorf("ipvs: find device %s: %w", c.Device, err)
		} else {
			err = b.openIPVS()
		}
	}
	if err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// openIPVS opens the socket of IPVS. The kernel loads the module ip_vs if it can.
func (b *Backend) openIPVS() error {
	return b.ns.Do(func() (err error) {
		if b.kernel, err = dialKernel(b.config.Forwarding); err != nil {
			return unsupported(0, "IPVS (module ip_vs)", err)
		}
		return nil
	})
}

// findTools finds the iptables programs of each family. Rules are written by programs
// because the kernel's interface for them is private to iptables.
func (b *Backend) findTools(ctx context.Context) error {
	b.tools = map[tracker.Family]*iptool.Tool{}
	for _, f := range b.config.Families {
		t, err := findTool(ctx, b.config, f, b.ns)
		if errors.Is(err, iptool.ErrUnsupported) {
			return unsupported(f, "iptables", err)
		}
		if err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		b.tools[f] = t
	}
	return nil
}

// findTool finds the iptables programs of a family.
func findTool(ctx context.Context, c Config, f tracker.Family, ns *netns.Namespace) (*iptool.Tool, error) {
	return iptool.Find(ctx, iptool.Config{Family: f, Flavour: string(c.IPTables), Namespace: ns, LockWait: lockWait})
}

// lockWait bounds the wait for another program that holds the xtables lock.
const lockWait = 10 * time.Second

// saved returns the output of iptables-save for all tables.
func saved(ctx context.Context, t *iptool.Tool) (string, error) {
	var out strings.Builder
	err := t.Save(ctx, "", &out)
	return out.String(), err
}

func (b *Backend) close() {
	if b.kernel != nil {
		b.kernel.close()
	}
	if b.sets != nil {
		b.sets.close()
	}
	if b.device != nil {
		b.device.close()
	}
	if b.ns != nil {
		b.ns.Close()
	}
}

// Close closes the backend's sockets and leaves everything in the kernel in place.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.closed = true
		b.states, b.before = nil, nil
		b.close()
	}
	return nil
}

// Apply makes the kernel agree with d, as [ruleset.Backend] requires.
//
// It adds before it removes: set elements, then virtual servers with their real servers,
// then addresses. Removal goes in the reverse order. A packet to a Service therefore
// meets all parts of the Service at every step.
//
// For a full delta, Apply first reads the kernel's state, including objects of other
// processes, and writes only the differences. Real servers with weight 0 that no endpoint
// wants count as draining. Apply removes a virtual server that no Service wants if its
// mark or an element in one of the sets identifies it as a Backend's.
//
// A [*ruleset.PartialError] names Services that are not programmed, or only in part.
// The error wraps [ruleset.ErrNeedFull] if an object that was in the kernel is missing.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	return b.do(ctx, func() error {
		if d.Full {
			if err := b.read(ctx, d); err != nil {
				b.forget()
				return err
			}
		}
		if b.states == nil {
			return ruleset.ErrNeedFull
		}
		failed := map[tracker.Key]error{}
		for _, s := range b.states {
			u := newUpdate(b, s, failed)
			if err := u.apply(ctx, d); err != nil {
				if errors.Is(err, ruleset.ErrNeedFull) {
					b.config.Log.Warn("ipvs: state of the kernel is unknown, a full sync will repair it", slog.Any("error", err))
				}
				if d.Full || errors.Is(err, ruleset.ErrNeedFull) {
					b.forget()
				}
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		if d.Full {
			b.remember()
			// Binding addresses causes events, which may overflow the socket's buffer.
			if err := b.followAddresses(); err != nil {
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		if len(failed) == 0 {
			return nil
		}
		for k, err := range failed {
			backendconf.Complain(b.complaints, slog.LevelError, k, "ipvs: service not programmed", err)
		}
		return &ruleset.PartialError{Failed: failed}
	})
}

// forget records that the kernel's state is unknown. The last known state is kept, because
// another program may have removed the elements that identify virtual servers.
func (b *Backend) forget() {
	if b.before == nil {
		b.before = b.states
	}
	b.states = nil
}

// remember records that the kernel's state is known, after a full delta.
func (b *Backend) remember() {
	b.before = nil
	for _, s := range b.states {
		s.before = nil
	}
}

// do runs f with the lock held.
func (b *Backend) do(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return fmt.Errorf("ipvs: backend: %w", os.ErrClosed)
	}
	return f()
}

// read sets up the node and reads the kernel's state, before a full delta.
func (b *Backend) read(ctx context.Context, d *ruleset.Delta) error {
	if !b.config.KeepSysctls {
		if err := b.ns.Do(b.config.setSysctls); err != nil {
			return err
		}
	}
	if err := b.kernel.setTimeouts(b.config.Timeouts); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	if err := b.device.ensure(); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	b.forget()
	var states []*state
	for i, f := range b.config.Families {
		for id := range setCount {
			if err := b.sets.create(id, f); err != nil {
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		s, err := b.readFamily(f, time.Now())
		if err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		if b.before != nil {
			s.before = b.before[i]
		}
		if err := b.writeRules(ctx, s, d.Node, true); err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		states = append(states, s)
	}
	b.states = states
	return nil
}

// readFamily reads the kernel's state in one family.
func (b *Backend) readFamily(f tracker.Family, now time.Time) (*state, error) {
	s := newState(f)
	for id := range setCount {
		err := b.sets.list(id, f, func(e entry, mark uint32) { s.entries.found(e, mark) })
		if err != nil {
			return nil, err
		}
	}
	// From here on the kernel reports changes.
	if _, err := b.device.changed(); err != nil {
		return nil, err
	}
	err := b.device.addresses(f, func(a netip.Addr) { s.bound.found(a, struct{}{}) }, func(a netip.Addr) { s.own[a] = true })
	if err != nil {
		return nil, err
	}
	err = b.kernel.virtuals(f, func(k virtualKey, v virtual) {
		proto := k.proto
		if k.mark != 0 {
			proto = inet.TCP // a mark has no protocol; TCP servers drain
		}
		s.virtuals[k] = &virtualState{virtual: v, proto: proto, reals: map[netip.AddrPort]uint16{}}
	})
	if err != nil {
		return nil, err
	}
	for k, v := range s.virtuals {
		err := b.kernel.reals(k, func(r real) {
			v.reals[r.at] = uint16(r.weight)
			if r.weight == 0 {
				s.startDrain(k, r.at, now)
			}
		})
		if errors.Is(err, unix.ESRCH) {
			// Another program deleted the virtual server after the list was read.
			delete(s.virtuals, k)
			delete(s.drainingReals, k)
			continue
		}
		if err != nil {
			return nil, err
		}
	}
	return s, nil
}

// written holds the netfilter rules in place in one family.
type written struct {
	// text is the input of iptables-restore, and saved the output of iptables-save
	// afterwards.
	text, saved string
}

// writeRules writes the netfilter rules for a node unless they are in place.
func (b *Backend) writeRules(ctx context.Context, s *state, n *ruleset.Node, read bool) error {
	r := rules{family: s.family, mark: b.config.mark(), marks: b.config.Marks, node: n}
	if err := r.validate(); err != nil {
		return err
	}
	tables := r.tables()
	last := b.rules[s.family]
	text := restoreAll(tables, "")
	if !read && text == last.text {
		s.node = n
		return nil
	}
	tool := b.tools[s.family]
	have, err := saved(ctx, tool)
	if err != nil {
		return err
	}
	if text != last.text || ownRules(tables, have) != last.saved {
		if err := tool.Restore(ctx, []byte(restoreAll(tables, have))); err != nil {
			return err
		}
		if have, err = saved(ctx, tool); err != nil {
			return err
		}
	}
	b.rules[s.family] = written{text, ownRules(tables, have)}
	s.node = n
	return nil
}
