package modes

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/tracker"
)

// families are the address families, for which a flavor is chosen together.
var families = [...]tracker.Family{tracker.IPv4, tracker.IPv6}

// ChooseFlavor chooses the flavor of iptables for the network namespace of the calling thread. It
// changes nothing: it neither creates tables nor loads the modules of iptables-legacy.
func ChooseFlavor(ctx context.Context, c *config.Config) (f Flavor) {
	if c.Mode != config.ModeIPTables && c.Mode != config.ModeIPVS && c.Mode != config.ModeNFTables {
		return f
	}
	ns, err := netns.Open(nil)
	if err != nil {
		return f // the data plane cannot be opened, either
	}
	defer ns.Close()
	nft, legacy := newReader(ctx, ns, config.FlavorNFT), newReader(ctx, ns, config.FlavorLegacy)
	if c.Mode == config.ModeNFTables {
		for _, r := range []*reader{nft, legacy} {
			for _, what := range r.drops(ctx) {
				f.drops = append(f.drops, fmt.Sprintf("iptables-%s, %s", r.flavor, what))
			}
		}
		return f
	}
	if f.Name, f.why = c.Flavor, "--iptables-flavor"; f.Name == config.FlavorAuto {
		if nft.hint == "" && legacy.hint == "" {
			nft.countRules(ctx)
			legacy.countRules(ctx)
		}
		f.Name, f.why = decide(nft.flavorState, legacy.flavorState, usualFlavor(ctx, ns))
	}
	switch f.Name {
	case config.FlavorNFT:
		f.drops = legacy.drops(ctx)
	case config.FlavorLegacy:
		f.drops = nft.drops(ctx)
	}
	return f
}

// usualFlavor returns the flavor of the programs without one in their names, or nft if there are none.
func usualFlavor(ctx context.Context, ns *netns.Namespace) config.Flavor {
	for _, f := range families {
		if t, err := iptool.Find(ctx, toolConfig(ns, f, config.FlavorAuto)); err == nil && !t.NFT() {
			return config.FlavorLegacy
		}
	}
	return config.FlavorNFT
}

func toolConfig(ns *netns.Namespace, f tracker.Family, flavor config.Flavor) iptool.Config {
	return iptool.Config{Family: f, Flavor: string(flavor), Namespace: ns, Timeout: time.Minute}
}

// reader reads the tables of one flavor. It ignores what it cannot read.
type reader struct {
	flavorState
	flavor config.Flavor
	tools  map[tracker.Family]*iptool.Tool
}

// newReader returns a reader that has looked for kubelet's chains.
func newReader(ctx context.Context, ns *netns.Namespace, flavor config.Flavor) *reader {
	r := &reader{flavor: flavor, tools: map[tracker.Family]*iptool.Tool{}}
	var missing []error
	for _, f := range families {
		t, err := iptool.Find(ctx, toolConfig(ns, f, flavor))
		saved := ""
		if err == nil {
			r.tools[f] = t
			saved, err = r.save(ctx, f, "mangle")
		}
		if err != nil && !strings.Contains(err.Error(), "Permission denied") {
			delete(r.tools, f)
			missing = append(missing, err)
		}
		if r.hint == "" {
			r.hint = hintIn(saved)
		}
	}
	if len(missing) == len(families) {
		r.missing = missing[0] // the other family's is of the same kind
	}
	return r
}

// save returns the output of iptables-save for a table, or for all tables if table is "". It does not
// read a table of iptables-legacy that does not exist, since that would create it.
func (r *reader) save(ctx context.Context, f tracker.Family, table string) (string, error) {
	if r.flavor == config.FlavorLegacy {
		if tables, _ := legacyTables(f); len(tables) == 0 || table != "" && !slices.Contains(tables, table) {
			return "", nil
		}
	}
	var out strings.Builder
	err := r.tools[f].Save(ctx, table, &out)
	return out.String(), err
}

// countRules counts the rules of all tables.
func (r *reader) countRules(ctx context.Context) {
	for f := range r.tools {
		if saved, err := r.save(ctx, f, ""); err == nil {
			r.rules += strings.Count(saved, "\n-A ")
		}
	}
}

// drops returns how chain FORWARD drops packets, for each family in which it does.
func (r *reader) drops(ctx context.Context) (out []string) {
	for _, f := range families {
		if r.tools[f] == nil {
			continue
		}
		if saved, err := r.save(ctx, f, "filter"); err == nil {
			if what := dropIn(saved); what != "" {
				out = append(out, fmt.Sprintf("%v: %s", f, what))
			}
		}
	}
	return out
}
