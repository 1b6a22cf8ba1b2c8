package ipvs

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/ipvs/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// memory is a network namespace in memory, with the errors that Linux would return. Its methods may be
// called concurrently.
type memory struct {
	*fake.Kernel
	// fail, unless it is nil, is called before each write. If it returns an error, the write
	// fails with it. Every second failed write takes effect, as if its answer was lost.
	fail func() error
	// look, unless it is nil, is called after each write.
	look func()
	// refused holds addresses that cannot be real servers, and missing the schedulers that
	// the kernel lacks.
	refused map[netip.Addr]bool
	missing map[Scheduler]bool
	// noServer holds addresses at which no virtual server and no real server can be added. The zero
	// Addr stands for virtual servers with a mark.
	noServer map[netip.Addr]bool
	noIPv6   bool
	// halfOpen holds the destinations of the connections that have not ended, among those that are
	// inactive.
	halfOpen map[netip.AddrPort]bool

	failures int
	// events counts changes of addresses on other devices than dummy devices.
	events   int
	params   map[string]string
	timeouts Timeouts
}

// newMemory returns a namespace with a device eth0 that has the addresses.
func newMemory(addrs ...netip.Addr) *memory {
	return &memory{
		Kernel:  fake.New(addrs...),
		refused: map[netip.Addr]bool{}, missing: map[Scheduler]bool{}, noServer: map[netip.Addr]bool{},
		params: map[string]string{}, halfOpen: map[netip.AddrPort]bool{},
	}
}

// server returns a virtual server, or nil.
func (m *memory) server(k virtualKey) *fake.Virtual { return m.Servers[serverOf(k)] }

func serverOf(k virtualKey) fake.Server {
	return fake.Server{Family: k.family, Protocol: k.proto, At: k.at, Mark: k.mark}
}

func elementOf(e entry) fake.Element {
	return fake.Element{Addr: e.addr, Protocol: e.proto, Port: e.port, Other: e.other}
}

// handlePacket returns what the namespace does with the first packet of a connection.
func (m *memory) handlePacket(p ruleset.Packet) conformance.Outcome {
	out := m.Handle(p)
	for i := range out.Endpoints {
		// A pod on another node cannot reach itself through this one.
		if c := &out.Endpoints[i]; p.InInterface == "eth1" && c.Addr.Addr() == p.From {
			c.Masquerade = true
		}
	}
	return out
}

// memoryNode is a namespace in memory as a node.
type memoryNode struct{ *memory }

func (n memoryNode) open(_ testing.TB, c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	n.missing["zz"] = true
	b := newBackend(c, n.handle(c))
	return b, b.probe()
}

func (n memoryNode) lines(tb testing.TB, command string) []string {
	tb.Helper()
	args := strings.Fields(command)
	out, err := n.Run(args[0], args[1:]...)
	if err != nil {
		tb.Fatalf("%s: %v", command, err)
	}
	if args[0] == "ip" && args[1] == "addr" && !strings.HasSuffix(command, deviceName) {
		n.Do(func() { n.events++ })
	}
	if out == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(out, "\n"), "\n")
}

func (n memoryNode) limit(_ testing.TB, set string, most int) { n.Sets[set].Max = most }

// handle returns a kernel for one Backend.
func (m *memory) handle(c Config) *memoryKernel { return &memoryKernel{memory: m, config: c} }

// memoryKernel is one Backend's access to a namespace.
type memoryKernel struct {
	*memory
	config Config
	// index is the device's index, and seen the number of events that were read.
	index, seen int
}

var _ kernel = &memoryKernel{}

// write makes a change, unless it must fail.
func (m *memory) write(do func() error) error {
	var failed, err error
	if m.fail != nil {
		failed = m.fail()
	}
	m.Do(func() {
		if failed != nil {
			m.failures++
		}
		if failed == nil || m.failures%2 == 0 {
			err = do()
		}
	})
	if failed != nil {
		return failed
	}
	if err == nil && m.look != nil {
		m.look()
	}
	return err
}

func (m *memory) close()                      {}
func (m *memory) release() string             { return "6.12.0" }
func (m *memory) ipv6Disabled() (bool, error) { return m.noIPv6, nil }

func (m *memory) setParameters(list []parameter) error {
	return m.write(func() error {
		for _, p := range list {
			m.params[p.name] = p.value
		}
		return nil
	})
}

func (m *memory) find(k virtualKey) (*fake.Virtual, error) {
	v := m.server(k)
	if v == nil {
		return nil, syscall.ESRCH
	}
	return v, nil
}

func (m *memory) virtuals(f tracker.Family, fn func(virtualKey, virtual)) error {
	m.Do(func() {
		for s, v := range m.Servers {
			if s.Family == f {
				fn(virtualKey{s.Family, s.Protocol, s.At, s.Mark}, virtual{Scheduler(v.Scheduler), v.Flags, v.Timeout})
			}
		}
	})
	return nil
}

func (m *memory) reals(k virtualKey, fn func(real)) (err error) {
	m.Do(func() {
		v, missing := m.find(k)
		if err = missing; err != nil {
			return
		}
		for at, r := range v.Reals {
			fn(real{at, r.Weight, Forwarding(r.Forwarding) | Forwarding(r.Tunnel)<<tunnelShift, r.Active, r.Inactive})
		}
	})
	return wrap(err, "list real servers of", k)
}

func (m *memory) statistics(f tracker.Family) (map[virtualKey]dataplane.Counters, error) {
	out := map[virtualKey]dataplane.Counters{}
	m.Do(func() {
		for s, v := range m.Servers {
			if s.Family == f {
				out[virtualKey{s.Family, s.Protocol, s.At, s.Mark}] = v.Counters
			}
		}
	})
	return out, nil
}

// setReal sets the properties of a real server.
func setReal(to *fake.Real, r real) {
	to.Weight, to.Forwarding, to.Tunnel, to.Port = r.weight, uint8(r.forwarding)&(1<<tunnelShift-1), r.forwarding.tunnel(), 0
	if r.forwarding == ForwardingGUE {
		to.Port = portGUE
	}
}

// setProperties sets the properties of a virtual server.
func setProperties(to *fake.Virtual, v virtual) {
	to.Scheduler, to.Flags, to.Timeout = string(v.scheduler), v.flags, v.timeout
}

func (m *memory) addVirtual(k virtualKey, v virtual) error {
	return wrap(m.write(func() error {
		if m.missing[v.scheduler] {
			return syscall.ENOENT
		}
		if m.noServer[k.at.Addr()] {
			return syscall.ENOMEM
		}
		if m.server(k) == nil {
			m.Servers[serverOf(k)] = &fake.Virtual{Reals: map[netip.AddrPort]*fake.Real{}}
		}
		setProperties(m.server(k), v)
		return nil
	}), "add virtual server", k)
}

func (m *memory) setVirtual(k virtualKey, v virtual) error {
	return wrap(m.write(func() error {
		have, err := m.find(k)
		if err == nil {
			setProperties(have, v)
		}
		return err
	}), "set virtual server", k)
}

func (m *memory) delVirtual(k virtualKey) error {
	return wrap(m.write(func() error { delete(m.Servers, serverOf(k)); return nil }), "delete virtual server", k)
}

func (m *memory) addReal(k virtualKey, r real) error {
	return wrap(m.write(func() error {
		v, err := m.find(k)
		switch {
		case err != nil:
			return err
		case m.refused[r.at.Addr()]:
			return syscall.EINVAL
		case m.noServer[k.at.Addr()]:
			return syscall.ENOMEM
		case v.Reals[r.at] == nil:
			v.Reals[r.at] = &fake.Real{}
		}
		setReal(v.Reals[r.at], r)
		return nil
	}), "add real server "+r.at.String()+" to", k)
}

func (m *memory) setReal(k virtualKey, r real) error {
	return wrap(m.write(func() error {
		v, err := m.find(k)
		if err != nil {
			return err
		}
		if v.Reals[r.at] == nil {
			return syscall.ENOENT
		}
		setReal(v.Reals[r.at], r)
		return nil
	}), "set real server "+r.at.String()+" of", k)
}

func (m *memory) delReal(k virtualKey, at netip.AddrPort) error {
	return wrap(m.write(func() error {
		v, err := m.find(k)
		if err == nil {
			delete(v.Reals, at)
		}
		return err
	}), "delete real server "+at.String()+" of", k)
}

func (m *memory) setTimeouts(t Timeouts) error {
	m.Do(func() { m.timeouts = t })
	return nil
}

func (m *memory) connections(_ tracker.Family, fn func(...netip.AddrPort)) error {
	for at := range m.halfOpen {
		fn(at)
	}
	return nil
}

func (m *memory) hasSets() error { return nil }

func (m *memory) createSet(s setID, f tracker.Family) error {
	typeName, _ := sets[s].kind.typeName()
	return m.write(func() error {
		switch have := m.Sets[s.name(f)]; {
		case have == nil:
			m.Sets[s.name(f)] = &fake.Set{Type: typeName, Family: f, Max: maxElements, Skbinfo: sets[s].kind == hashIPPortMark, Elements: map[fake.Element]uint32{}}
		case have.Type != typeName:
			return fmt.Errorf("create set %s of type %s: the set exists with type %s", s.name(f), typeName, have.Type)
		}
		return nil
	})
}

func (m *memory) destroySet(s setID, f tracker.Family) error {
	return m.write(func() error {
		_ = m.Destroy(s.name(f)) // a rule may use it
		return nil
	})
}

func (m *memory) listSet(s setID, f tracker.Family, fn func(entry, uint32)) (err error) {
	m.Do(func() {
		set := m.Sets[s.name(f)]
		if set == nil {
			err = fmt.Errorf("list set %s: %w", s.name(f), syscall.ENOENT)
			return
		}
		for e, mark := range set.Elements {
			fn(entry{s, f, e.Addr, e.Protocol, e.Port, e.Other}, mark)
		}
	})
	return err
}

func (m *memory) changeSet(s setID, f tracker.Family, list []entry, change func(*fake.Set, entry) error) error {
	err := m.write(func() error {
		set := m.Sets[s.name(f)]
		if set == nil {
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, syscall.ENOENT)
		}
		for _, e := range list {
			if err := change(set, e); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("change set %s: %w", s.name(f), err)
	}
	return nil
}

func (m *memory) addEntries(s setID, f tracker.Family, list []entry, marks map[entry]uint32) error {
	return m.changeSet(s, f, list, func(set *fake.Set, e entry) error {
		if set.Add(elementOf(e), marks[e]) != nil {
			return errSetFull
		}
		return nil
	})
}

func (m *memory) delEntries(s setID, f tracker.Family, list []entry) error {
	return m.changeSet(s, f, list, func(set *fake.Set, e entry) error {
		delete(set.Elements, elementOf(e))
		return nil
	})
}

func (m *memoryKernel) ensureDevice() error {
	return m.write(func() error {
		d := m.Devices[deviceName]
		if d == nil {
			d = m.AddDevice(deviceName, "dummy")
		}
		if d.Kind != "dummy" {
			return fmt.Errorf("device %s is a %s, not a dummy device", deviceName, d.Kind)
		}
		m.index = d.Index
		return nil
	})
}

func (m *memoryKernel) findDevice() (err error) {
	m.Do(func() {
		if m.device() == nil {
			err = fmt.Errorf("no device %s with index %d", deviceName, m.index)
		}
	})
	return err
}

func (m *memoryKernel) removeDevice() error {
	return m.write(func() error {
		if d := m.Devices[deviceName]; d != nil && d.Kind == "dummy" {
			delete(m.Devices, deviceName)
		}
		return nil
	})
}

// device returns the Backend's device, or nil if it was deleted.
func (m *memoryKernel) device() *fake.Device {
	if d := m.Devices[deviceName]; d != nil && d.Index == m.index {
		return d
	}
	return nil
}

func (m *memoryKernel) addresses(f tracker.Family, bound, own func(netip.Addr)) error {
	m.Do(func() {
		for _, d := range m.Devices {
			for a := range d.Addrs {
				switch {
				case tracker.FamilyOf(a) != f:
				case d == m.device():
					bound(a)
				case !a.IsLoopback():
					own(a)
				}
			}
		}
	})
	return nil
}

func (m *memoryKernel) addressesChanged() (changed bool, err error) {
	m.Do(func() { changed, m.seen = m.seen != m.events, m.events })
	return changed, nil
}

func (m *memoryKernel) bind(a netip.Addr) error {
	return m.write(func() error {
		d := m.device()
		if d == nil {
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, syscall.ENODEV)
		}
		if m.noIPv6 && a.Is6() {
			return fmt.Errorf("add address %s: %w", a, syscall.EACCES)
		}
		d.Addrs[a] = true
		return nil
	})
}

func (m *memoryKernel) unbind(a netip.Addr) error {
	return m.write(func() error {
		if d := m.device(); d != nil {
			delete(d.Addrs, a)
		}
		return nil
	})
}

func (m *memory) waitLocal(context.Context, []netip.Addr) error { return nil }

func (m *memory) savedRules(ctx context.Context, f tracker.Family) (iptext.Saved, error) {
	var out bytes.Buffer
	if err := m.Tables[f].Save(ctx, "", &out); err != nil {
		return nil, err
	}
	return iptext.Parse(out.String()), nil
}

func (m *memory) restoreMarks(wanted bool) error {
	return m.write(func() error {
		if m.Marks = (fake.Marks{}); wanted {
			m.Marks = fake.Marks{Value: markDrop, Keep: markBits}
		}
		return nil
	})
}

func (m *memory) marksRestored() (err error) {
	m.Do(func() {
		if m.Marks == (fake.Marks{}) {
			err = syscall.ENOENT
		}
	})
	return err
}

func (m *memory) restoreRules(ctx context.Context, f tracker.Family, input string) error {
	return m.write(func() error { return m.Tables[f].Restore(ctx, []byte(input)) })
}
