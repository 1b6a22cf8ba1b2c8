package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
)

// lookupIPVS tells what IPVS does with a packet: the agent's, or kube-proxy's.
func lookupIPVS(ctx context.Context, out io.Writer, q question) error {
	f := q.verdict.Frontend
	found, err := ipvs.Lookup(ctx, ipvs.Config{}, ruleset.Query{
		Packet: q.packet, Internal: q.near, NodePort: f != nil && f.Kind == ruleset.NodePort,
	})
	var drift *ruleset.DriftError
	switch {
	case errors.Is(err, ruleset.ErrNoRules):
		fmt.Fprintln(out, "kernel: mode ipvs has no rules in this network namespace")
		return nil
	case errors.As(err, &drift):
		fmt.Fprintf(out, "kernel: %s\nkernel: DIFFERS from what should be\n", drift.What)
		return errDiffers
	case err != nil:
		return err
	case !found.Entry:
		return q.compare(out, "no virtual server for it", "", nil, q.entry())
	}
	return q.compare(out, found.Where, found.Service, found.Endpoints, q.entry())
}
