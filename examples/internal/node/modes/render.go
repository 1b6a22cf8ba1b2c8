package modes

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// ErrNoRenderer is wrapped by the error of [NewRenderer] for a mode whose rules cannot be rendered.
var ErrNoRenderer = errors.New("cannot be rendered")

// Renderer renders deltas as the text that the tools of the configured mode read, without a kernel and on
// every system.
type Renderer func(*ruleset.Delta) (string, error)

// RenderedFamilies returns the families of each Renderer of a mode.
func RenderedFamilies(mode string) [][]tracker.Family {
	if mode == config.ModeIPVS {
		return [][]tracker.Family{{tracker.IPv4, tracker.IPv6}}
	}
	return [][]tracker.Family{{tracker.IPv4}, {tracker.IPv6}}
}

// NewRenderer returns a Renderer of the configured mode, for families that [RenderedFamilies] returns.
func NewRenderer(c *config.Config, families []tracker.Family) (Renderer, error) {
	switch c.Mode {
	case config.ModeNFTables:
		r, err := nftables.NewRenderer(nftablesConfig(Settings{Config: c}), families[0])
		if err != nil {
			return nil, err
		}
		return textOf(r.Render), nil
	case config.ModeIPTables:
		r, err := iptables.NewRenderer(iptables.Config{MasqueradeMark: c.MasqueradeMark, LocalhostNodePorts: c.ServesLoopback()}, families[0])
		if err != nil {
			return nil, err
		}
		return textOf(r.Render), nil
	case config.ModeIPVS:
		ic, err := ipvsConfig(Settings{Config: c, Families: families})
		if err != nil {
			return nil, err
		}
		r, err := ipvs.NewRenderer(ic)
		if err != nil {
			return nil, err
		}
		return func(d *ruleset.Delta) (string, error) {
			t, refused := r.Render(d)
			if t == nil {
				return "", refused
			}
			later, err := r.Retire()
			if err != nil {
				return "", err
			}
			text := t.String()
			if !later.Empty() {
				text += "# when the connections of what drains have ended\n" + later.String()
			}
			return text, refused
		}, nil
	}
	return nil, fmt.Errorf("mode %s %w: nftables, iptables and ipvs can", c.Mode, ErrNoRenderer)
}

// textOf returns a Renderer by a function that returns a transaction, or nil.
func textOf[T interface {
	comparable
	Empty() bool
	String() string
}](render func(*ruleset.Delta) (T, error)) Renderer {
	return func(d *ruleset.Delta) (string, error) {
		t, err := render(d)
		if t == *new(T) || t.Empty() {
			return "", err
		}
		return t.String(), err
	}
}

func nftablesConfig(s Settings) nftables.Config {
	c := nftables.Config{Families: s.Families, MasqueradeMark: s.MasqueradeMark, Clients: s.Clients, NetNS: s.NetNS, Log: s.Log}
	if len(s.Offload) != 0 {
		c.Offload = &nftables.Offload{Interfaces: s.Offload}
	}
	return c
}

// propertiesOf returns what a Service's annotations say.
func propertiesOf(p *ruleset.Port) ipvs.Properties {
	s, _ := p.Spec.Ext.(annotations.Server)
	return ipvs.Properties{
		Scheduler: ipvs.Scheduler(s.Scheduler), HashPort: s.Port, OnePacket: s.OnePacket,
		Forwarding: map[string]ipvs.Forwarding{
			"direct": ipvs.ForwardingDirect, "tunnel": ipvs.ForwardingTunnel, "gue": ipvs.ForwardingGUE, "gre": ipvs.ForwardingGRE,
		}[s.Forwarding],
	}
}

func ipvsConfig(s Settings) (ipvs.Config, error) {
	e := s.Effective.IPVS
	c := ipvs.Config{
		Families: s.Families, IPTables: s.Flavor, MasqueradeMark: s.MasqueradeMark, NetNS: s.NetNS, Log: s.Log,
		Properties: propertiesOf, Scheduler: ipvs.Scheduler(e.Scheduler), StrictARP: e.StrictARP, DrainLimit: s.DrainLimit,
		Timeouts: ipvs.Timeouts{TCP: e.TCPTimeout.Duration, TCPFin: e.TCPFinTimeout.Duration, UDP: e.UDPTimeout.Duration},
	}
	if slices.Contains(s.Annotations, "ipvs-scheduler") {
		c.Schedulers = ipvs.Schedulers()
	}
	for _, cidr := range e.ExcludeCIDRs {
		p, err := netip.ParsePrefix(cidr)
		if err != nil {
			return c, err
		}
		c.ExcludeCIDRs = append(c.ExcludeCIDRs, p.Masked())
	}
	return c, nil
}
