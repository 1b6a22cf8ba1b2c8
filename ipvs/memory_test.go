package ipvs

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/iptables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// memory is a network namespace in memory. It stores what Linux would, and returns the errors
// that Linux would. Its methods may be called concurrently.
type memory struct {
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

	mu       sync.Mutex
	failures int
	virtuals map[virtualKey]*memoryVirtual
	sets     map[string]*memorySet
	devices  map[string]*memoryDevice
	// events counts changes of addresses on other devices than dummy devices, and devices
	// that were added.
	events, added int
	tables        map[tracker.Family]*fake.Tables
	restored      Marks
	params        map[string]string
	timeouts      Timeouts
}

type memoryVirtual struct {
	virtual
	reals map[netip.AddrPort]*real
	stats dataplane.Counters
}

// memorySet is a set. Its elements have no set and family.
type memorySet struct {
	typeName string
	most     int
	elements map[entry]uint32
}

type memoryDevice struct {
	kind  string
	index int
	addrs map[netip.Addr]bool
}

// newMemory returns a namespace with a device eth0 that has the addresses.
func newMemory(addrs ...netip.Addr) *memory {
	m := &memory{
		refused: map[netip.Addr]bool{}, missing: map[Scheduler]bool{}, noServer: map[netip.Addr]bool{},
		virtuals: map[virtualKey]*memoryVirtual{}, sets: map[string]*memorySet{}, devices: map[string]*memoryDevice{},
		tables: map[tracker.Family]*fake.Tables{tracker.IPv4: fake.New(true), tracker.IPv6: fake.New(true)},
		params: map[string]string{},
	}
	m.addDevice("eth0", "veth")
	for _, a := range addrs {
		m.devices["eth0"].addrs[a] = true
	}
	return m
}

func (m *memory) addDevice(name, kind string) {
	m.added++
	m.devices[name] = &memoryDevice{kind, m.added, map[netip.Addr]bool{}}
}

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
	var failed error
	if m.fail != nil {
		failed = m.fail()
	}
	m.mu.Lock()
	var err error
	if failed != nil {
		m.failures++
	}
	if failed == nil || m.failures%2 == 0 {
		err = do()
	}
	m.mu.Unlock()
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

func (m *memory) find(k virtualKey) (*memoryVirtual, error) {
	v := m.virtuals[k]
	if v == nil {
		return nil, syscall.ESRCH
	}
	return v, nil
}

func (m *memoryKernel) virtuals(f tracker.Family, fn func(virtualKey, virtual)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, v := range m.memory.virtuals {
		if k.family == f {
			fn(k, v.virtual)
		}
	}
	return nil
}

func (m *memory) reals(k virtualKey, fn func(real)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, err := m.find(k)
	if err != nil {
		return wrap(err, "list real servers of", k)
	}
	for _, r := range v.reals {
		fn(*r)
	}
	return nil
}

func (m *memory) statistics(f tracker.Family) (map[virtualKey]dataplane.Counters, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[virtualKey]dataplane.Counters{}
	for k, v := range m.virtuals {
		if k.family == f {
			out[k] = v.stats
		}
	}
	return out, nil
}

func (m *memory) addVirtual(k virtualKey, v virtual) error {
	return wrap(m.write(func() error {
		if m.missing[v.scheduler] {
			return syscall.ENOENT
		}
		if m.noServer[k.at.Addr()] {
			return syscall.ENOMEM
		}
		if have := m.virtuals[k]; have != nil {
			have.virtual = v
		} else {
			m.virtuals[k] = &memoryVirtual{virtual: v, reals: map[netip.AddrPort]*real{}}
		}
		return nil
	}), "add virtual server", k)
}

func (m *memory) setVirtual(k virtualKey, v virtual) error {
	return wrap(m.write(func() error {
		have, err := m.find(k)
		if err == nil {
			have.virtual = v
		}
		return err
	}), "set virtual server", k)
}

func (m *memory) delVirtual(k virtualKey) error {
	return wrap(m.write(func() error { delete(m.virtuals, k); return nil }), "delete virtual server", k)
}

func (m *memoryKernel) addReal(k virtualKey, r real) error {
	at := r.at
	return wrap(m.write(func() error {
		v, err := m.find(k)
		switch {
		case err != nil:
			return err
		case m.refused[at.Addr()]:
			return syscall.EINVAL
		case m.noServer[k.at.Addr()]:
			return syscall.ENOMEM
		case v.reals[at] == nil:
			v.reals[at] = &real{at: at}
		}
		v.reals[at].weight, v.reals[at].forwarding = r.weight, r.forwarding
		return nil
	}), "add real server "+at.String()+" to", k)
}

func (m *memory) setReal(k virtualKey, r real) error {
	at := r.at
	return wrap(m.write(func() error {
		v, err := m.find(k)
		if err != nil {
			return err
		}
		if v.reals[at] == nil {
			return syscall.ENOENT
		}
		v.reals[at].weight, v.reals[at].forwarding = r.weight, r.forwarding
		return nil
	}), "set real server "+at.String()+" of", k)
}

func (m *memory) delReal(k virtualKey, at netip.AddrPort) error {
	return wrap(m.write(func() error {
		v, err := m.find(k)
		if err == nil {
			delete(v.reals, at)
		}
		return err
	}), "delete real server "+at.String()+" of", k)
}

func (m *memory) setTimeouts(t Timeouts) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.timeouts = t
	return nil
}

func (m *memory) hasSets() error { return nil }

func (m *memory) createSet(s setID, f tracker.Family) error {
	typeName, _ := sets[s].kind.typeName()
	return m.write(func() error {
		switch have := m.sets[s.name(f)]; {
		case have == nil:
			m.sets[s.name(f)] = &memorySet{typeName, 1 << 22, map[entry]uint32{}}
		case have.typeName != typeName:
			return fmt.Errorf("create set %s of type %s: the set exists with type %s", s.name(f), typeName, have.typeName)
		}
		return nil
	})
}

func (m *memory) destroySet(s setID, f tracker.Family) error {
	var rules bytes.Buffer
	if err := m.tables[f].Save(context.Background(), "", &rules); err != nil {
		return err
	}
	return m.write(func() error {
		if !bytes.Contains(rules.Bytes(), []byte(" "+s.name(f)+" ")) {
			delete(m.sets, s.name(f))
		}
		return nil
	})
}

func (m *memory) listSet(s setID, f tracker.Family, fn func(entry, uint32)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	set := m.sets[s.name(f)]
	if set == nil {
		return fmt.Errorf("list set %s: %w", s.name(f), syscall.ENOENT)
	}
	for e, mark := range set.elements {
		e.set, e.family = s, f
		fn(e, mark)
	}
	return nil
}

func (m *memory) changeSet(s setID, f tracker.Family, list []entry, change func(*memorySet, entry) error) error {
	err := m.write(func() error {
		set := m.sets[s.name(f)]
		if set == nil {
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, syscall.ENOENT)
		}
		for _, e := range list {
			e.set, e.family = 0, 0
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
	return m.changeSet(s, f, list, func(set *memorySet, e entry) error {
		if _, ok := set.elements[e]; !ok && len(set.elements) >= set.most {
			return errSetFull
		}
		full := e
		full.set, full.family = s, f
		set.elements[e] = marks[full]
		return nil
	})
}

func (m *memory) delEntries(s setID, f tracker.Family, list []entry) error {
	return m.changeSet(s, f, list, func(set *memorySet, e entry) error {
		delete(set.elements, e)
		return nil
	})
}

func (m *memoryKernel) ensureDevice() error {
	return m.write(func() error {
		if m.devices[deviceName] == nil {
			m.addDevice(deviceName, "dummy")
		}
		d := m.devices[deviceName]
		if d.kind != "dummy" {
			return fmt.Errorf("device %s is a %s, not a dummy device", deviceName, d.kind)
		}
		m.index = d.index
		return nil
	})
}

func (m *memoryKernel) findDevice() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d := m.devices[deviceName]; d == nil || d.index != m.index {
		return fmt.Errorf("no device %s with index %d", deviceName, m.index)
	}
	return nil
}

func (m *memoryKernel) removeDevice() error {
	return m.write(func() error {
		if d := m.devices[deviceName]; d != nil && d.kind == "dummy" {
			delete(m.devices, deviceName)
		}
		return nil
	})
}

// device returns the Backend's device, or nil if it was deleted.
func (m *memoryKernel) device() *memoryDevice {
	if d := m.devices[deviceName]; d != nil && d.index == m.index {
		return d
	}
	return nil
}

func (m *memoryKernel) addresses(f tracker.Family, bound, own func(netip.Addr)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.devices {
		for a := range d.addrs {
			switch {
			case tracker.FamilyOf(a) != f:
			case d == m.device():
				bound(a)
			case !a.IsLoopback():
				own(a)
			}
		}
	}
	return nil
}

func (m *memoryKernel) addressesChanged() (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	changed := m.seen != m.events
	m.seen = m.events
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
		d.addrs[a] = true
		return nil
	})
}

func (m *memoryKernel) unbind(a netip.Addr) error {
	return m.write(func() error {
		if d := m.device(); d != nil {
			delete(d.addrs, a)
		}
		return nil
	})
}

func (m *memoryKernel) waitLocal(context.Context, []netip.Addr) error { return nil }

func (m *memory) savedRules(ctx context.Context, f tracker.Family) (iptext.Saved, error) {
	var out bytes.Buffer
	if err := m.tables[f].Save(ctx, "", &out); err != nil {
		return nil, err
	}
	return iptext.Parse(out.String()), nil
}

func (m *memory) restoreMarks(marks Marks) error {
	return m.write(func() error { m.restored = marks; return nil })
}

func (m *memory) marksRestored() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.restored == (Marks{}) {
		return syscall.ENOENT
	}
	return nil
}

func (m *memory) restoreRules(ctx context.Context, f tracker.Family, input string) error {
	return m.write(func() error { return m.tables[f].Restore(ctx, []byte(input)) })
}

// local returns all addresses of the namespace.
func (m *memory) local() (out []netip.Addr) {
	for _, d := range m.devices {
		out = slices.AppendSeq(out, maps.Keys(d.addrs))
	}
	return out
}
