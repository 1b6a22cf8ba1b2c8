package ipvs

import (
	"context"
	"net/netip"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// counter counts the requests to a kernel.
type counter struct {
	kernel
	servers, sets, addrs int
}

// count makes a Backend count its requests. It must be called before the Backend is used.
func count(b *Backend) *counter {
	c := &counter{kernel: b.kernel}
	b.kernel = c
	return c
}

func (c *counter) total() int { return c.servers + c.sets + c.addrs }

func (c *counter) virtuals(f tracker.Family, fn func(virtualKey, virtual)) error {
	c.servers++
	return c.kernel.virtuals(f, fn)
}

func (c *counter) reals(k virtualKey, fn func(real)) error {
	c.servers++
	return c.kernel.reals(k, fn)
}

func (c *counter) statistics(f tracker.Family) (map[virtualKey]dataplane.Counters, error) {
	c.servers++
	return c.kernel.statistics(f)
}

func (c *counter) addVirtual(k virtualKey, v virtual) error {
	c.servers++
	return c.kernel.addVirtual(k, v)
}

func (c *counter) setVirtual(k virtualKey, v virtual) error {
	c.servers++
	return c.kernel.setVirtual(k, v)
}

func (c *counter) delVirtual(k virtualKey) error {
	c.servers++
	return c.kernel.delVirtual(k)
}

func (c *counter) addReal(k virtualKey, r real) error {
	c.servers++
	return c.kernel.addReal(k, r)
}

func (c *counter) setReal(k virtualKey, r real) error {
	c.servers++
	return c.kernel.setReal(k, r)
}

func (c *counter) delReal(k virtualKey, at netip.AddrPort) error {
	c.servers++
	return c.kernel.delReal(k, at)
}

func (c *counter) setTimeouts(t Timeouts) error {
	if t != (Timeouts{}) {
		c.servers++
	}
	return c.kernel.setTimeouts(t)
}

func (c *counter) createSet(s setID, f tracker.Family) error {
	c.sets++
	return c.kernel.createSet(s, f)
}

func (c *counter) listSet(s setID, f tracker.Family, fn func(entry, uint32)) error {
	c.sets++
	return c.kernel.listSet(s, f, fn)
}

func (c *counter) addEntries(s setID, f tracker.Family, list []entry, marks map[entry]uint32) error {
	c.sets++
	return c.kernel.addEntries(s, f, list, marks)
}

func (c *counter) delEntries(s setID, f tracker.Family, list []entry) error {
	c.sets++
	return c.kernel.delEntries(s, f, list)
}

func (c *counter) ensureDevice() error {
	c.addrs++
	return c.kernel.ensureDevice()
}

func (c *counter) findDevice() error {
	c.addrs++
	return c.kernel.findDevice()
}

func (c *counter) addresses(f tracker.Family, bound, own func(netip.Addr)) error {
	c.addrs++
	return c.kernel.addresses(f, bound, own)
}

func (c *counter) bind(a netip.Addr) error {
	c.addrs++
	return c.kernel.bind(a)
}

func (c *counter) unbind(a netip.Addr) error {
	c.addrs++
	return c.kernel.unbind(a)
}

func (c *counter) waitLocal(ctx context.Context, list []netip.Addr) error {
	c.addrs += len(list)
	return c.kernel.waitLocal(ctx, list)
}
