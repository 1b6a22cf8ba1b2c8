package modes

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// ErrNoRenderer is wrapped by the error of [NewRenderer] for a mode whose rules cannot be rendered.
var ErrNoRenderer = errors.New("cannot be rendered")

// Renderer renders deltas as the text that the tools of the configured mode read, without a kernel and on
// every system.
type Renderer func(*ruleset.Delta) (string, error)

// NewRenderer returns the Renderer of the configured mode, for one family.
func NewRenderer(c *config.Config, f tracker.Family) (Renderer, error) {
	switch c.Mode {
	case config.ModeNFTables:
		r, err := nftables.NewRenderer(nftablesConfig(Settings{Config: c}), f)
		if err != nil {
			return nil, err
		}
		return func(d *ruleset.Delta) (string, error) {
			t, err := r.Render(d)
			if t == nil || t.Empty() {
				return "", err
			}
			return t.String(), err
		}, nil
	case config.ModeIPTables:
		r, err := iptables.NewRenderer(iptables.Config{MasqueradeMark: c.MasqueradeMark, LocalhostNodePorts: LocalhostNodePorts(c)}, f)
		if err != nil {
			return nil, err
		}
		return func(d *ruleset.Delta) (string, error) {
			t, err := r.Render(d)
			if t == nil {
				return "", err
			}
			return t.String(), err
		}, nil
	}
	return nil, fmt.Errorf("mode %s %w: nftables and iptables can", c.Mode, ErrNoRenderer)
}

// nftablesConfig returns the configuration of mode nftables.
func nftablesConfig(s Settings) nftables.Config {
	c := nftables.Config{Families: s.Families, MasqueradeMark: s.MasqueradeMark, Clients: s.Clients, CountPackets: s.CountPackets, NetNS: s.NetNS, Log: s.Log}
	if len(s.Offload) != 0 {
		c.Offload = &nftables.Offload{Interfaces: s.Offload}
	}
	return c
}

// LocalhostNodePorts reports whether NodePorts answer at IPv4 loopback addresses: the
// configuration must enable it, and nodePortAddresses must contain such an address.
func LocalhostNodePorts(c *config.Config) bool {
	if !*c.Effective.IPTables.LocalhostNodePorts {
		return false
	}
	within, given := false, false
	for _, s := range c.Effective.NodePortAddresses {
		switch p, err := netip.ParsePrefix(s); {
		case s == "all" || s == "localhost":
			within = true
		case s == "primary":
			given = true
		case err == nil && p.Addr().Is4():
			given = true
			within = within || p.Overlaps(netip.MustParsePrefix("127.0.0.0/8"))
		}
	}
	return within || !given
}
