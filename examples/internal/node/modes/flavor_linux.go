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
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/iptables"
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
	hints := c.Mode != config.ModeNFTables && c.Flavor == iptables.AnyFlavor
	native, legacy := newReader(ctx, iptables.NFT, hints), newReader(ctx, iptables.Legacy, hints)
	if c.Mode == config.ModeNFTables {
		for _, r := range []*reader{native, legacy} {
			for _, what := range r.drops(ctx) {
				f.drops = append(f.drops, fmt.Sprintf("iptables-%s, %s", r.flavor, what))
			}
		}
		return f
	}
	if f.Name, f.why = c.Flavor, "--iptables-flavor"; f.Name == iptables.AnyFlavor {
		if native.hint == "" && legacy.hint == "" {
			native.countRules(ctx)
			legacy.countRules(ctx)
		}
		f.Name, f.why = decide(native.flavorState, legacy.flavorState, func() iptables.Flavor { return usualFlavor(ctx) })
	}
	switch f.Name {
	case iptables.NFT:
		f.drops = legacy.drops(ctx)
	case iptables.Legacy:
		f.drops = native.drops(ctx)
	}
	return f
}

// usualFlavor returns the flavor of the programs without one in their names, or nft if there are none.
func usualFlavor(ctx context.Context) iptables.Flavor {
	for _, f := range families {
		if version, err := output(ctx, program(f, iptables.AnyFlavor, "restore"), "--version"); err == nil && !strings.Contains(version, "nf_tables") {
			return iptables.Legacy
		}
	}
	return iptables.NFT
}

// program returns the name of a program of iptables, such as ip6tables-nft-save.
func program(f tracker.Family, flavor iptables.Flavor, suffix string) string {
	name := "iptables"
	if f == tracker.IPv6 {
		name = "ip6tables"
	}
	if flavor != iptables.AnyFlavor {
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
	flavor iptables.Flavor
	usable map[tracker.Family]bool
}

// newReader returns a reader. With hints, it has looked for kubelet's chains.
func newReader(ctx context.Context, flavor iptables.Flavor, hints bool) *reader {
	r := &reader{flavor: flavor, usable: map[tracker.Family]bool{}}
	var missing []error
	for _, f := range families {
		_, err := exec.LookPath(program(f, flavor, "restore"))
		saved := ""
		if err == nil && hints {
			saved, err = r.save(ctx, f, "mangle")
		}
		foreign := flavor == iptables.NFT && unreadable(saved, err)
		r.usable[f] = err == nil || foreign || strings.Contains(err.Error(), "Permission denied")
		if !r.usable[f] {
			missing = append(missing, err)
		}
		if r.hint == "" {
			r.hint = hintIn(saved)
			if foreign {
				r.hint = hintOf(f)
			}
		}
	}
	if len(missing) == len(families) {
		r.missing = missing[0] // the other family's is of the same kind
	}
	return r
}

// unreadable reports whether iptables-nft-save cannot print tables, because of rules that only nft can
// list. err is the program's.
func unreadable(saved string, err error) bool {
	return strings.Contains(saved, "is incompatible, use 'nft' tool.") ||
		err != nil && strings.Contains(err.Error(), "Parsing nftables rule failed")
}

// hintOf returns kubelet's chain in the table mangle of nf_tables, or "".
func hintOf(f tracker.Family) string {
	conn, err := nft.Dial(nil, 1<<16)
	if err != nil {
		return ""
	}
	defer conn.Close()
	for _, hint := range hints {
		if found, err := conn.HasBaseChain("mangle", inet.AF(f), hint); err == nil && found {
			return hint
		}
	}
	return ""
}

// save returns the output of iptables-save for a table, or for all tables if table is "". It does not
// read a table of iptables-legacy that does not exist, since that would create it.
func (r *reader) save(ctx context.Context, f tracker.Family, table string) (string, error) {
	if r.flavor == iptables.Legacy {
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

// each calls fn with the output of iptables-save, as save returns it, for each family that can be read.
func (r *reader) each(ctx context.Context, table string, fn func(f tracker.Family, saved string)) {
	for _, f := range families {
		if !r.usable[f] {
			continue
		}
		if saved, err := r.save(ctx, f, table); err == nil {
			fn(f, saved)
		}
	}
}

func (r *reader) countRules(ctx context.Context) {
	r.each(ctx, "", func(_ tracker.Family, saved string) { r.rules += strings.Count(saved, "\n-A ") })
}

// drops returns how chain FORWARD drops packets, for each family in which it does.
func (r *reader) drops(ctx context.Context) (out []string) {
	r.each(ctx, "filter", func(f tracker.Family, saved string) {
		if what := dropIn(saved); what != "" {
			out = append(out, fmt.Sprintf("%v: %s", f, what))
		}
	})
	return out
}
