package modes

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
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
	nft, legacy := newReader(ctx, config.FlavorNFT), newReader(ctx, config.FlavorLegacy)
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
		f.Name, f.why = decide(nft.flavorState, legacy.flavorState, usualFlavor(ctx))
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
func usualFlavor(ctx context.Context) config.Flavor {
	for _, f := range families {
		if version, err := output(ctx, program(f, config.FlavorAuto, "restore"), "--version"); err == nil && !strings.Contains(version, "nf_tables") {
			return config.FlavorLegacy
		}
	}
	return config.FlavorNFT
}

// program returns the name of a program of iptables, such as ip6tables-nft-save.
func program(f tracker.Family, flavor config.Flavor, suffix string) string {
	name := "iptables"
	if f == tracker.IPv6 {
		name = "ip6tables"
	}
	if flavor != config.FlavorAuto {
		name += "-" + string(flavor)
	}
	return name + "-" + suffix
}

// output runs a program in the network namespace of the calling thread.
func output(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(exit.Stderr)))
	}
	return string(out), err
}

// reader reads the tables of one flavor. It ignores what it cannot read.
type reader struct {
	flavorState
	flavor config.Flavor
	usable map[tracker.Family]bool
}

// newReader returns a reader that has looked for kubelet's chains.
func newReader(ctx context.Context, flavor config.Flavor) *reader {
	r := &reader{flavor: flavor, usable: map[tracker.Family]bool{}}
	var missing []error
	for _, f := range families {
		_, err := output(ctx, program(f, flavor, "restore"), "--version")
		saved := ""
		if err == nil {
			saved, err = r.save(ctx, f, "mangle")
		}
		r.usable[f] = err == nil || strings.Contains(err.Error(), "Permission denied")
		if !r.usable[f] {
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
	var args []string
	if table != "" {
		args = []string{"-t", table}
	}
	return output(ctx, program(f, r.flavor, "save"), args...)
}

// countRules counts the rules of all tables.
func (r *reader) countRules(ctx context.Context) {
	for _, f := range families {
		if !r.usable[f] {
			continue
		}
		if saved, err := r.save(ctx, f, ""); err == nil {
			r.rules += strings.Count(saved, "\n-A ")
		}
	}
}

// drops returns how chain FORWARD drops packets, for each family in which it does.
func (r *reader) drops(ctx context.Context) (out []string) {
	for _, f := range families {
		if !r.usable[f] {
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
