package main

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/go-proxier/proxier/nftables"
)

// run is the verb run.
func run(ctx context.Context, args []string, out, diag io.Writer) error {
	var opts options
	flags := opts.runFlags(diag)
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	if err := opts.validateRun(); err != nil {
		return err
	}
	log := opts.logger(diag)
	if opts.cleanup {
		if err := nftables.Cleanup(ctx, nftables.Config{Log: log}); err != nil {
			return err
		}
		log.Info("removed all rules")
		return nil
	}
	a, err := newAgent(opts, out, log)
	if err != nil {
		return err
	}
	addresses := a.tracker.Node().Addresses
	log.Info("serving", "manifests", opts.manifests, "node", opts.hostname, "addresses", fmt.Sprint(addresses))
	if len(addresses) == 0 && slices.Equal(opts.nodePortAddresses, []string{"primary"}) {
		log.Warn("no address of this node is known, so NodePorts are not served for now")
	}
	err = a.run(ctx)
	if err == nil {
		log.Info("stopped; the rules stay in effect")
	}
	return err
}
