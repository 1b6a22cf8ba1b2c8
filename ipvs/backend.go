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

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Backend programs one network namespace's IPVS, with what belongs around it. It
// implements [ruleset.Backend]. Its methods are safe for concurrent use.
type Backend struct {
	config Config

	mu     sync.Mutex
	ns     *netns.Namespace
	tools  map[tracker.Family]*iptool.Tool
	kernel *kernel
	sets   *ipsets
	device *device
	// states is what is in the kernel, by family, or nil while that is not known.
	states []*state
	// rules is what was last written of those.
	rules  map[tracker.Family]written
	closed bool
}

// New returns a backend for the network namespace that c names. It opens netlink
// sockets and checks that the kernel can do what is needed, which changes nothing
// that lasts: an [*UnsupportedError] says what it cannot. Everything else is done
// when the first full delta is applied, and stays as it is when the backend is
// closed.
func New(c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Backend{config: c, rules: map[tracker.Family]written{}}
	if err = b.open(); err == nil {
		err = b.findTools(context.Background())
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

// open opens the namespace and the sockets in it.
func (b *Backend) open() (err error) {
	if b.ns, err = netns.Open(b.config.NetNS); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return b.ns.Do(func() (err error) {
		if b.kernel, err = dialKernel(b.config.Forwarding); err != nil {
			return errNoIPVS(err)
		}
		return b.openOthers()
	})
}

// openOthers opens the sockets of ipset and rtnetlink, in the calling thread's
// namespace.
func (b *Backend) openOthers() (err error) {
	if b.sets, err = dialIPSets(); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	if b.device, err = dialDevice(b.config.Device); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	return nil
}

// findTools finds the iptables tools of each family. They are the one thing that is
// done by programs, because the kernel's interface for these rules is theirs alone.
func (b *Backend) findTools(ctx context.Context) error {
	b.tools = map[tracker.Family]*iptool.Tool{}
	for _, f := range b.config.Families {
		t, err := findTool(ctx, b.config, f, b.ns)
		if errors.Is(err, iptool.ErrUnsupported) {
			return &UnsupportedError{Feature: "iptables", Err: err}
		}
		if err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		b.tools[f] = t
	}
	return nil
}

// findTool finds the iptables tools of a family.
func findTool(ctx context.Context, c Config, f tracker.Family, ns *netns.Namespace) (*iptool.Tool, error) {
	flavour := map[IPTables]string{SystemTables: "", NFTables: "nft", LegacyTables: "legacy"}[c.IPTables]
	return iptool.Find(ctx, iptool.Config{Family: f, Flavour: flavour, Namespace: ns, LockWait: lockWait})
}

// lockWait bounds the wait for another program that holds the xtables lock.
const lockWait = 10 * time.Second

// saved returns what iptables-save prints of all tables.
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

// Close closes the backend's sockets and leaves everything in place. What is called
// after it returns an error that is [os.ErrClosed].
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.closed = true
		b.states = nil
		b.close()
	}
	return nil
}

// Apply makes the kernel agree with d, as [ruleset.Backend] says.
//
// What is new comes before what goes: elements of sets, then virtual servers with
// their real servers, then addresses; and the other way round for what is gone. So
// a packet to a Service meets all of it, whichever part of the delta is done.
//
// A full delta begins with reading what the kernel holds, whoever put it there, and
// changes only what differs. Real servers with weight 0 that no endpoint asks for
// are taken to be draining. Virtual servers that no Service asks for are removed if
// an element in one of the sets says that they are the backend's.
//
// A [*ruleset.PartialError] names Services that cannot be programmed or only in
// part. [ruleset.ErrNeedFull] comes when something is found missing that was there.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	return b.do(ctx, func() error {
		if d.Full {
			if err := b.read(ctx, d); err != nil {
				b.states = nil
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
					b.config.Log.Warn("ipvs: reading all", slog.Any("reason", err))
				}
				if d.Full || errors.Is(err, ruleset.ErrNeedFull) {
					b.states = nil
				}
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		if d.Full {
			// What was bound has made news of its own, too much to be told of perhaps.
			if err := b.followAddresses(); err != nil {
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		if len(failed) == 0 {
			return nil
		}
		for k, err := range failed {
			b.config.Log.Error("ipvs: service not programmed", slog.String("service", k.String()), slog.Any("error", err))
		}
		return &ruleset.PartialError{Failed: failed}
	})
}

// do runs f with the lock held.
func (b *Backend) do(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	return f()
}

// read sets up the node and reads what is in the kernel, before a full delta.
func (b *Backend) read(ctx context.Context, d *ruleset.Delta) error {
	if !b.config.KeepSysctls {
		if err := b.ns.Do(b.setSysctls); err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
	}
	if err := b.kernel.setTimeouts(b.config.Timeouts); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	if err := b.device.ensure(); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	b.states = nil
	var states []*state
	for _, f := range b.config.Families {
		for id := range setCount {
			if err := b.sets.create(id, f); err != nil {
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		s, err := b.readFamily(f, time.Now())
		if err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		if err := b.writeRules(ctx, s, d.Node, true); err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		states = append(states, s)
	}
	b.states = states
	return nil
}

func (b *Backend) setSysctls() error {
	for _, s := range Sysctls(b.config, release()) {
		if err := s.set(); err != nil {
			return err
		}
	}
	return nil
}

// readFamily reads what the kernel holds. What is in doubt is taken to be as an
// earlier process left it.
func (b *Backend) readFamily(f tracker.Family, now time.Time) (*state, error) {
	s := newState(f)
	for id := range setCount {
		err := b.sets.list(id, f, func(e entry, mark uint32) { s.entries.found(e, mark) })
		if err != nil {
			return nil, err
		}
	}
	// Later changes are told of.
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
			proto = inet.TCP // not told; the one that matters
		}
		s.virtuals[k] = &virtualState{virtual: v, proto: proto, reals: map[netip.AddrPort]realState{}}
	})
	if err != nil {
		return nil, err
	}
	for k, v := range s.virtuals {
		err := b.kernel.reals(k, func(r real) {
			v.reals[r.at] = realState{uint16(r.weight), serving}
			if r.weight == 0 {
				v.reals[r.at] = realState{0, draining}
				s.startDrain(k, r.at, now)
			}
		})
		if errors.Is(err, unix.ESRCH) {
			// Somebody else's, gone in the meantime.
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

// written is the netfilter rules in place in one family.
type written struct {
	// text is what was asked for, and saved what iptables-save made of it.
	text, saved string
}

// writeRules has the netfilter rules be those for a node, and leaves those that
// are.
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

// errClosed is what a closed backend answers.
var errClosed = fmt.Errorf("ipvs: backend: %w", os.ErrClosed)
