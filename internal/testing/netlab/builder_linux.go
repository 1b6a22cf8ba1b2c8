package netlab

import "net/netip"

// Builder builds the network of a [Lab] by steps until one fails. Later steps do nothing. It is
// for programs; tests can fail immediately.
type Builder struct {
	Lab *Lab
	// Err is the error of the step that failed.
	Err error
}

// Do runs a step.
func (b *Builder) Do(step func() error) {
	if b.Err == nil {
		b.Err = step()
	}
}

// Host adds a host to the lab.
func (b *Builder) Host(name string) (h *Host) {
	b.Do(func() (err error) { h, err = b.Lab.Host(name); return err })
	return h
}

// Link joins two hosts, as [Lab.Link] does.
func (b *Builder) Link(x *Host, ifx string, y *Host, ify string) {
	b.Do(func() error { return b.Lab.Link(x, ifx, y, ify) })
}

// Addrs adds addresses with the lengths of their prefixes to an interface.
func (b *Builder) Addrs(h *Host, ifname string, prefixes ...string) {
	for _, p := range prefixes {
		b.Do(func() error { return h.AddAddr(ifname, netip.MustParsePrefix(p)) })
	}
}

// Routes adds routes to prefixes through via, or direct ones if via is "". With a via, ifname may
// be "".
func (b *Builder) Routes(h *Host, ifname, via string, to ...string) {
	var gw netip.Addr
	if via != "" {
		gw = netip.MustParseAddr(via)
	}
	for _, dst := range to {
		b.Do(func() error { return h.AddRoute(netip.MustParsePrefix(dst), gw, ifname) })
	}
}
