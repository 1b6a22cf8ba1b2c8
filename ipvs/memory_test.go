package ipvs

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"sync"
	"syscall"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptmemory"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// memory is a network namespace in memory, with the errors that Linux would return. Its methods may be
// called concurrently.
type memory struct {
	mu      sync.Mutex
	servers map[virtualKey]*memoryServer
	// sets holds the ipsets by name, and devices the network devices.
	sets    map[string]*memorySet
	devices map[string]*memoryDevice
	tables  map[tracker.Family]*iptmemory.Tables
	// marks is set while the chains exist that restore marks.
	marks bool
	// added is the index of the latest device.
	added int

	// strict makes it an error to add what exists and to delete what is missing, as for the programs of a Renderer.
	strict bool
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

type memoryServer struct {
	virtual
	reals map[netip.AddrPort]*real
	// counters holds what the kernel counted. No packet changes it.
	counters dataplane.Counters
}

type memorySet struct {
	kind setKind
	// max is the largest number of elements of a hash.
	max int
	// elements holds the packet marks of the elements, whose field set is that of key.
	elements map[entry]uint32
}

// key returns an element as every set of its kind has it.
func (s *memorySet) key(e entry) entry {
	for e.set = 0; sets[e.set].kind != s.kind; e.set++ {
	}
	return e
}

type memoryDevice struct {
	kind string
	// index is different for each device that ever was.
	index int
	addrs map[netip.Addr]bool
}

// newMemory returns a namespace with a device eth0 that has the addresses.
func newMemory(addrs ...netip.Addr) *memory {
	m := &memory{
		servers: map[virtualKey]*memoryServer{}, sets: map[string]*memorySet{}, devices: map[string]*memoryDevice{},
		tables:  map[tracker.Family]*iptmemory.Tables{tracker.IPv4: iptmemory.New(), tracker.IPv6: iptmemory.New()},
		refused: map[netip.Addr]bool{}, missing: map[Scheduler]bool{}, noServer: map[netip.Addr]bool{},
		params: map[string]string{}, halfOpen: map[netip.AddrPort]bool{},
	}
	eth0 := m.addDevice("eth0", "veth")
	for _, a := range addrs {
		eth0.addrs[a] = true
	}
	return m
}

func (m *memory) addDevice(name, kind string) *memoryDevice {
	m.added++
	m.devices[name] = &memoryDevice{kind, m.added, map[netip.Addr]bool{}}
	return m.devices[name]
}

// do calls f while no other method uses the namespace.
func (m *memory) do(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// handle returns a kernel for one Backend.
func (m *memory) handle() *memoryKernel { return &memoryKernel{memory: m} }

// memoryKernel is one Backend's access to a namespace.
type memoryKernel struct {
	*memory
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
	m.do(func() {
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

func (m *memory) find(k virtualKey) (*memoryServer, error) {
	v := m.servers[k]
	if v == nil {
		return nil, syscall.ESRCH
	}
	return v, nil
}

func (m *memory) virtuals(f tracker.Family, fn func(virtualKey, virtual)) error {
	m.do(func() {
		for k, v := range m.servers {
			if k.family == f {
				fn(k, v.virtual)
			}
		}
	})
	return nil
}

func (m *memory) reals(k virtualKey, fn func(real)) (err error) {
	m.do(func() {
		v, missing := m.find(k)
		if err = missing; err != nil {
			return
		}
		for _, r := range v.reals {
			fn(*r)
		}
	})
	return wrap(err, "list real servers of", k)
}

func (m *memory) statistics(f tracker.Family) (map[virtualKey]dataplane.Counters, error) {
	out := map[virtualKey]dataplane.Counters{}
	m.do(func() {
		for k, v := range m.servers {
			if k.family == f {
				out[k] = v.counters
			}
		}
	})
	return out, nil
}

func (m *memory) addVirtual(k virtualKey, v virtual) error {
	return wrap(m.write(func() error {
		have := m.servers[k]
		switch {
		case m.missing[v.scheduler]:
			return syscall.ENOENT
		case m.noServer[k.at.Addr()]:
			return syscall.ENOMEM
		case have == nil:
			m.servers[k] = &memoryServer{virtual: v, reals: map[netip.AddrPort]*real{}}
		case m.strict:
			return syscall.EEXIST
		default:
			have.virtual = v
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
	return wrap(m.write(func() error {
		if _, err := m.find(k); err != nil && m.strict {
			return err
		}
		delete(m.servers, k)
		return nil
	}), "delete virtual server", k)
}

// changeReal makes a change of a real server, which is nil if it is missing.
func (m *memory) changeReal(what string, k virtualKey, at netip.AddrPort, change func(v *memoryServer, have *real) error) error {
	return wrap(m.write(func() error {
		v, err := m.find(k)
		if err == nil {
			err = change(v, v.reals[at])
		}
		return err
	}), what+" real server "+at.String(), k)
}

func (m *memory) addReal(k virtualKey, r real) error {
	return m.changeReal("add", k, r.at, func(v *memoryServer, have *real) error {
		switch {
		case m.refused[r.at.Addr()]:
			return syscall.EINVAL
		case m.noServer[k.at.Addr()]:
			return syscall.ENOMEM
		case have == nil:
			v.reals[r.at] = &r
		case m.strict:
			return syscall.EEXIST
		default:
			have.weight, have.forwarding = r.weight, r.forwarding
		}
		return nil
	})
}

func (m *memory) setReal(k virtualKey, r real) error {
	return m.changeReal("set", k, r.at, func(_ *memoryServer, have *real) error {
		if have == nil {
			return syscall.ENOENT
		}
		have.weight, have.forwarding = r.weight, r.forwarding
		return nil
	})
}

func (m *memory) delReal(k virtualKey, at netip.AddrPort) error {
	return m.changeReal("delete", k, at, func(v *memoryServer, have *real) error {
		if have == nil && m.strict {
			return syscall.ENOENT
		}
		delete(v.reals, at)
		return nil
	})
}

func (m *memory) setTimeouts(t Timeouts) error {
	m.do(func() { m.timeouts = t })
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
	kind := sets[s].kind
	return m.write(func() error {
		switch have := m.sets[s.name(f)]; {
		case have == nil:
			m.sets[s.name(f)] = &memorySet{kind, maxElements, map[entry]uint32{}}
		case have.kind != kind:
			return fmt.Errorf("create set %s: the set exists with another type", s.name(f))
		}
		return nil
	})
}

func (m *memory) destroySet(s setID, f tracker.Family) error {
	return m.write(func() error {
		var rules bytes.Buffer
		for _, t := range m.tables {
			if err := t.Save(context.Background(), "", &rules); err != nil {
				return err
			}
		}
		if !bytes.Contains(rules.Bytes(), []byte("-set "+s.name(f)+" ")) {
			delete(m.sets, s.name(f))
		}
		return nil
	})
}

func (m *memory) listSet(s setID, f tracker.Family, fn func(entry, uint32)) (err error) {
	m.do(func() {
		set := m.sets[s.name(f)]
		if set == nil {
			err = fmt.Errorf("list set %s: %w", s.name(f), syscall.ENOENT)
			return
		}
		for e, mark := range set.elements {
			e.set = s
			fn(e, mark)
		}
	})
	return err
}

func (m *memory) changeSet(s setID, f tracker.Family, list []entry, change func(*memorySet, entry) error) error {
	err := m.write(func() error {
		set := m.sets[s.name(f)]
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
	return m.changeSet(s, f, list, func(set *memorySet, e entry) error {
		if _, ok := set.elements[set.key(e)]; !ok && len(set.elements) >= set.max {
			return errSetFull
		}
		set.elements[set.key(e)] = marks[e]
		return nil
	})
}

func (m *memory) delEntries(s setID, f tracker.Family, list []entry) error {
	return m.changeSet(s, f, list, func(set *memorySet, e entry) error {
		delete(set.elements, set.key(e))
		return nil
	})
}

func (m *memoryKernel) ensureDevice() error {
	return m.write(func() error {
		d := m.devices[deviceName]
		switch {
		case d == nil:
			d = m.addDevice(deviceName, "dummy")
		case m.strict:
			return syscall.EEXIST
		}
		if d.kind != "dummy" {
			return fmt.Errorf("device %s is a %s, not a dummy device", deviceName, d.kind)
		}
		m.index = d.index
		return nil
	})
}

func (m *memoryKernel) findDevice() (err error) {
	m.do(func() {
		if m.device() == nil {
			err = fmt.Errorf("no device %s with index %d", deviceName, m.index)
		}
	})
	return err
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
	m.do(func() {
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
	})
	return nil
}

func (m *memoryKernel) addressesChanged() (changed bool, err error) {
	m.do(func() { changed, m.seen = m.seen != m.events, m.events })
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
		if d.addrs[a] && m.strict {
			return syscall.EEXIST
		}
		d.addrs[a] = true
		return nil
	})
}

func (m *memoryKernel) unbind(a netip.Addr) error {
	return m.write(func() error {
		d := m.device()
		if m.strict && !d.addrs[a] {
			return syscall.EADDRNOTAVAIL
		}
		if d != nil {
			delete(d.addrs, a)
		}
		return nil
	})
}

func (m *memory) waitLocal(context.Context, []netip.Addr) error { return nil }

func (m *memory) savedRules(ctx context.Context, f tracker.Family) (iptext.Saved, error) {
	var out bytes.Buffer
	if err := m.tables[f].Save(ctx, "", &out); err != nil {
		return nil, err
	}
	return iptext.Parse(out.String()), nil
}

func (m *memory) restoreMarks(wanted bool) error {
	return m.write(func() error { m.marks = wanted; return nil })
}

func (m *memory) marksRestored() (err error) {
	m.do(func() {
		if !m.marks {
			err = syscall.ENOENT
		}
	})
	return err
}

func (m *memory) restoreRules(ctx context.Context, f tracker.Family, input string) error {
	return m.write(func() error { return m.tables[f].Restore(ctx, []byte(input)) })
}
