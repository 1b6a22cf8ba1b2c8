package main

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/ruleset"
)

// explain is the verb explain: it asks the ruleset what must happen to a packet.
// Nothing of the kernel is looked at.
func explain(args []string, out, diag io.Writer) error {
	opts := options{verbosity: 1}
	var from, in string
	flags := newFlagSet("explain", diag, `Usage: nodeproxy explain --manifests PATH [flags] ADDR:PORT[/PROTOCOL]

Tells what must happen to the first packet of a connection, and by which rule.
The protocol is TCP unless given.

`)
	opts.worldFlags(flags)
	flags.StringVar(&from, "from", "", "the `address` the packet comes from; the node's own if empty")
	flags.StringVar(&in, "in-interface", "", "the `interface` the packet comes in by; one that is no pod's if empty and --from is not the node's own address")
	if err := parse(flags, args, 1); err != nil {
		return err
	}
	if err := opts.validate(); err != nil {
		return err
	}
	packet, err := parsePacket(flags.Arg(0))
	if err != nil {
		return err
	}
	changes, err := manifests.NewReader(opts.manifests).Read()
	if err != nil {
		return err
	}
	none := func() ([]netip.Addr, error) { return nil, nil }
	w, err := newWorld(opts, changes, none, opts.logger(diag))
	if err != nil {
		return err
	}
	packet.NodeAddresses = w.tracker.Node().Addresses
	packet.InInterface = in
	if from != "" {
		if packet.From, err = netip.ParseAddr(from); err != nil {
			return bad("--from: %w", err)
		}
		if packet.From.Is4() != packet.To.Addr().Is4() {
			return bad("--from %v and %v are of different address families", packet.From, packet.To)
		}
		if in == "" && !slices.Contains(packet.NodeAddresses, packet.From) {
			packet.InInterface = outside
		}
	} else {
		for _, a := range packet.NodeAddresses {
			if a.Is4() == packet.To.Addr().Is4() {
				packet.From = a
			}
		}
	}
	writeVerdict(out, w.engine.Snapshot().Trace(packet))
	return nil
}

// outside stands for the interface of a packet of which only the source is known.
const outside = "(outside)"

// parsePacket reads "ADDR:PORT[/PROTOCOL]".
func parsePacket(s string) (ruleset.Packet, error) {
	to, protocol, given := strings.Cut(s, "/")
	p := ruleset.Packet{Protocol: v1.ProtocolTCP}
	if given {
		p.Protocol = v1.Protocol(strings.ToUpper(protocol))
	}
	var err error
	if p.To, err = netip.ParseAddrPort(to); err != nil {
		return p, bad("%q is not ADDR:PORT", to)
	}
	switch p.Protocol {
	case v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP:
		return p, nil
	}
	return p, bad("protocol %q is not TCP, UDP or SCTP", protocol)
}

func writeVerdict(out io.Writer, v ruleset.Verdict) {
	fmt.Fprintf(out, "%v: %s\n", v.Action, v.Rule)
	if v.Service != nil {
		fmt.Fprintf(out, "service: %v, by its %v\n", v.Service.Key, v.Frontend.Kind)
	}
	if v.Affinity != 0 {
		fmt.Fprintf(out, "affinity: to the same endpoint for %v\n", v.Affinity)
	}
	for _, e := range v.Endpoints {
		source := "source kept"
		if v.MasqueradeTo(e) {
			source = "masqueraded"
		}
		fmt.Fprintf(out, "endpoint: %v on node %q, %s\n", e.Addr, e.Node, source)
	}
}
