package nftables

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// minimumKernel is the oldest kernel release that the tests run in (.ci/kernels). Only errors use it.
const minimumKernel = "Linux 5.10"

// probe makes the kernel check, for each family, a transaction that creates a table with every kind of set, chain and
// rule, and deletes the table. Those of Config.Offload are in a transaction of their own, so that the error can name
// the feature.
func (b *Backend) probe() error {
	for _, f := range b.config.Families {
		if err := b.probeTable(f, false); err != nil {
			return err
		}
		if b.config.Offload == nil {
			continue
		}
		err := b.probeTable(f, true)
		var missing *dataplane.UnsupportedError
		if errors.As(err, &missing) {
			missing.Feature = "offload by flowtables (CONFIG_NFT_FLOW_OFFLOAD, CONFIG_NF_FLOW_TABLE_INET, and in Linux 5.10 CONFIG_NF_FLOW_TABLE_IPV4 and _IPV6): " + missing.Feature
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *Backend) probeTable(f tracker.Family, offload bool) error {
	node := &ruleset.Node{LocalTraffic: ruleset.LocalTraffic{InterfacePrefix: "veth"}}
	c := b.layout
	c.FastPath = offload
	t := model.NewTable(f, node, c, nil, 0)
	tx := &model.Tx{}
	tx.Object(model.Object{Kind: model.CreateNewTable, Family: f})
	t.CreateAll(tx)
	rules := b.config.rules(f, node)
	if !offload {
		rules.Offload = nil
	}
	w := b.conn.NewWriter(probeTable, rules)
	w.Add(tx)
	return b.probeWriter(w, f)
}

// probeWriter makes the kernel check what creates the probe table, and deletes the table in the same transaction.
func (b *Backend) probeWriter(w writer, f tracker.Family) error {
	if err := w.Finish(); err != nil {
		return fmt.Errorf("nftables: cannot probe kernel: %w", err)
	}
	w.Add(&model.Tx{Objects: []model.Object{{Kind: model.DeleteTable, Family: f}}})
	if err := b.conn.Commit(w); err != nil {
		return unsupported(f, err)
	}
	return nil
}

// unsupported returns a [*dataplane.UnsupportedError] for a family unless the kernel refused for a temporary reason.
func unsupported(f tracker.Family, err error) error {
	var refused *Error
	if !errors.As(err, &refused) {
		return fmt.Errorf("nftables: cannot probe kernel: %w", err)
	}
	e := &dataplane.UnsupportedError{Backend: "nftables", Family: f, Feature: refused.What, Minimum: minimumKernel, Err: err}
	switch {
	case backendconf.Temporary(refused):
		return fmt.Errorf("nftables: cannot probe kernel: %s: %w", f, err)
	case refused.Errno == syscall.EPERM:
		e.Feature, e.Minimum = "programming without CAP_NET_ADMIN in the network namespace's user namespace", ""
	}
	return e
}
