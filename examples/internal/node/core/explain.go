package core

import (
	"context"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// Explain returns what must happen to a packet, and what the kernel does with it, or nil if the mode has
// no rules in the kernel.
func (a *Agent) Explain(ctx context.Context, p ruleset.Packet) (v ruleset.Verdict, found *dataplane.Found, err error) {
	snapshot := a.Engine.Snapshot()
	if p.NodeAddresses == nil {
		p.NodeAddresses = a.Tracker.Node().Addresses
	}
	v = snapshot.Trace(p)
	if a.mode.Lookup == nil {
		return v, nil, nil
	}
	q := dataplane.Query{Packet: p}
	if f := v.Frontend; f != nil {
		q.NodePort = f.Kind == ruleset.KindNodePort
		q.Internal = f.ShortCircuit() && (p.InInterface == "" || snapshot.Node.LocalTraffic.Recognizes(p.From, p.InInterface))
	}
	err = a.options.Within(func() error {
		got, err := a.mode.Lookup(ctx, q)
		found = &got
		return err
	})
	return v, found, err
}
