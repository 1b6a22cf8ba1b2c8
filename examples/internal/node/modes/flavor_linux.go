package modes

import (
	"cmp"
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
	switch c.Mode {
	case config.ModeNFTables:
		for _, flavor := range []iptables.Flavor{iptables.NFT, iptables.Legacy} {
			for _, what := range drops(ctx, flavor) {
				f.drops = append(f.drops, fmt.Sprintf("iptables-%s, %s", flavor, what))
			}
		}
		return f
	case config.ModeIPTables, config.ModeIPVS:
	default:
		return f
	}
	if f.Name, f.why = c.Flavor, "--iptables-flavor"; f.Name == iptables.AnyFlavor {
		native, legacy := stateOf(ctx, iptables.NFT), stateOf(ctx, iptables.Legacy)
		if native.hint == "" && legacy.hint == "" {
			native.rules, legacy.rules = countRules(ctx, iptables.NFT), countRules(ctx, iptables.Legacy)
		}
		f.Name, f.why = decide(native, legacy, func() iptables.Flavor { return usualFlavor(ctx) })
	}
	if f.Name != iptables.AnyFlavor {
		f.drops = drops(ctx, other(f.Name))
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

// stateOf returns what the node has of a flavor, but for the number of rules. It ignores what it cannot read.
func stateOf(ctx context.Context, flavor iptables.Flavor) (s flavorState) {
	usable := false
	for _, f := range families {
		_, err := exec.LookPath(program(f, flavor, "restore"))
		saved := ""
		if err == nil {
			saved, err = save(ctx, flavor, f, "mangle")
		}
		hint := hintIn(saved)
		if flavor == iptables.NFT && unreadable(saved, err) {
			hint, err = hintOf(f), nil
		}
		s.hint = cmp.Or(s.hint, hint)
		if err == nil || strings.Contains(err.Error(), "Permission denied") {
			usable = true
		} else {
			s.missing = err
		}
	}
	if usable {
		s.missing = nil
	}
	return s
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
func save(ctx context.Context, flavor iptables.Flavor, f tracker.Family, table string) (string, error) {
	if flavor == iptables.Legacy {
		if tables, _ := legacyTables(f); len(tables) == 0 || table != "" && !slices.Contains(tables, table) {
			return "", nil
		}
	}
	var args []string
	if table != "" {
		args = []string{"-t", table}
	}
	return output(ctx, program(f, flavor, "save"), args...)
}

// countRules returns the number of rules that can be read.
func countRules(ctx context.Context, flavor iptables.Flavor) (n int) {
	for _, f := range families {
		if saved, err := save(ctx, flavor, f, ""); err == nil {
			n += strings.Count(saved, "\n-A ")
		}
	}
	return n
}

// drops returns how chain FORWARD drops packets, for each family in which it does.
func drops(ctx context.Context, flavor iptables.Flavor) (out []string) {
	for _, f := range families {
		if saved, err := save(ctx, flavor, f, "filter"); err == nil {
			if what := dropIn(saved); what != "" {
				out = append(out, fmt.Sprintf("%v: %s", f, what))
			}
		}
	}
	return out
}
