package main

import (
	"context"
	"fmt"
	"io"

	"github.com/go-proxier/proxier/nftables"
)

// run is the verb run.
func run(ctx context.Context, args []string, out, diag io.Writer) error {
	var opts options
	flags := opts.runFlags(diag)
	if err := parse(flags, args, 0, &opts); err != nil {
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
	log.Info("serving", "manifests", opts.manifests, "node", opts.hostname, "addresses", fmt.Sprint(a.tracker.Node().Addresses))
	err = a.run(ctx)
	if err == nil {
		log.Info("stopped; the rules stay in effect")
	}
	return err
}
