package config

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// LoopbackFamilies returns those of the served families in which the agent's process must
// serve NodePorts at a loopback address: nodePortAddresses explicitly contains the address, and
// the mode does not serve NodePorts there.
func (c *Config) LoopbackFamilies(served []tracker.Family) (out []tracker.Family) {
	for _, f := range served {
		other := c.Mode == ModeUserspace || c.Mode == ModeIPTables && f == tracker.IPv4
		if !other && c.loopbackOff() == "" && c.hasLoopback(f) {
			out = append(out, f)
		}
	}
	return out
}

// hasLoopback reports whether nodePortAddresses has the usual loopback address of a family.
func (c *Config) hasLoopback(f tracker.Family) bool {
	return c.NodePorts.Resolve(tracker.NodeInfo{}, f).AllowsLoopback(Loopback(f))
}

// LoopbackServer returns who serves NodePorts at a loopback address, as text, or "" if the
// kernel does or may, or to is no loopback address.
func (c *Config) LoopbackServer(to netip.Addr) string {
	f := tracker.FamilyOf(to)
	switch {
	case !to.IsLoopback() || c.Mode == ModeIPTables && f == tracker.IPv4 && *c.Effective.IPTables.LocalhostNodePorts:
		return ""
	case c.loopbackOff() != "":
		return "nothing serves it, since " + c.loopbackOff()
	case to != Loopback(f):
		return "nothing serves it, since the agent listens only at " + Loopback(f).String()
	}
	return "the agent's process serves it"
}

// loopbackOff returns why the agent's process serves no NodePorts, or "".
func (c *Config) loopbackOff() string {
	switch {
	case c.Mode == ModeUserspace: // its data plane serves them
		return ""
	case c.Mode == ModeIPTables && !*c.Effective.IPTables.LocalhostNodePorts:
		return "iptables.localhostNodePorts is false"
	case !c.Gates.Enabled(LocalhostNodePorts):
		return "the feature gate " + string(LocalhostNodePorts) + " is off"
	}
	return ""
}

// noteLoopback adds a note if loopback addresses in nodePortAddresses have no effect.
func (c *Config) noteLoopback() {
	why := c.loopbackOff()
	if why == "" || !c.hasLoopback(tracker.IPv4) && !c.hasLoopback(tracker.IPv6) {
		return
	}
	where := "loopback addresses"
	if c.Mode == ModeIPTables && *c.Effective.IPTables.LocalhostNodePorts {
		where = "::1"
	}
	c.Notes = append(c.Notes, "NodePorts do not answer at "+where+" in nodePortAddresses, since "+why)
}

// Loopback returns the usual loopback address of a family.
func Loopback(f tracker.Family) netip.Addr {
	if f == tracker.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// ServesLoopback reports whether NodePorts answer at IPv4 loopback addresses in mode iptables: the
// configuration must enable it, and nodePortAddresses must contain such an address.
func (c *Config) ServesLoopback() bool {
	v4 := c.NodePorts.Resolve(tracker.NodeInfo{}, tracker.IPv4)
	return *c.Effective.IPTables.LocalhostNodePorts &&
		(v4.All || len(v4.Loopback) != 0 || slices.ContainsFunc(v4.Prefixes, netip.MustParsePrefix("127.0.0.0/8").Overlaps))
}

// selectLoopback selects the IPv4 loopback addresses if mode iptables serves NodePorts there, as it does
// unless nodePortAddresses leaves them out.
func (c *Config) selectLoopback() (err error) {
	if c.Mode != ModeIPTables || !c.ServesLoopback() {
		return nil
	}
	values := append(slices.Clip(c.Effective.NodePortAddresses), "127.0.0.0/8")
	if c.NodePorts.Resolve(tracker.NodeInfo{}, tracker.IPv4).All {
		values = append(values, "0.0.0.0/0")
	}
	c.NodePorts, err = ruleset.ParseNodePortAddresses(values)
	return err
}
