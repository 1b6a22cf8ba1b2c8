package modes

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/iptables"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// TestUnusableFlavorIsNotChosen removes programs, and has a kernel without nf_tables.
func TestUnusableFlavorIsNotChosen(t *testing.T) {
	h := netlab.NewHost(t)
	netlab.NeedPrograms(t, "iptables-nft-save", "iptables-legacy-save")
	const noKernel = "#!/bin/sh\necho 'Failed to initialize nft: Protocol not supported' >&2\nexit 1\n"
	for _, tt := range []struct {
		name string
		// programs is the flavors of the programs on PATH. Those in failing report that the kernel
		// lacks the flavor.
		programs, failing []string
		flag, want        iptables.Flavor
		why               string
	}{
		{name: "both", programs: []string{"-nft", "-legacy", ""}, want: iptables.NFT, why: "same number"},
		{name: "no legacy", programs: []string{"-nft"}, want: iptables.NFT, why: "iptables-legacy cannot be used: "},
		{name: "no nft", programs: []string{"-legacy"}, want: iptables.Legacy, why: "iptables-nft cannot be used: "},
		{name: "neither", programs: []string{""}, want: iptables.AnyFlavor, why: "neither"},
		{name: "no nf_tables", programs: []string{"-nft", "-legacy"}, failing: []string{"-nft"}, want: iptables.Legacy, why: "Protocol not supported"},
		{name: "flag", programs: []string{"-nft", "-legacy"}, flag: iptables.Legacy, want: iptables.Legacy, why: "--iptables-flavor"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, paths := t.TempDir(), map[string]string{}
			for _, suffix := range tt.programs {
				for _, family := range []string{"iptables", "ip6tables"} {
					for _, what := range []string{"-save", "-restore"} {
						// iptables-restore may be of either flavor on this machine.
						real := family + suffix + what
						if suffix == "" {
							real = family + "-nft" + what
						}
						path := must.Get(exec.LookPath(real))(t)
						paths[family+suffix+what] = path
					}
				}
			}
			for name, path := range paths {
				must.Do(t, os.Symlink(path, filepath.Join(dir, name)))
			}
			for _, suffix := range tt.failing {
				for _, family := range []string{"iptables", "ip6tables"} {
					name := family + suffix + "-save"
					os.Remove(filepath.Join(dir, name))
					must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(noKernel), 0o700))
				}
			}
			t.Setenv("PATH", dir)
			var f Flavor
			err := h.Do(func() error {
				f = ChooseFlavor(t.Context(), &config.Config{Mode: config.ModeIPTables, Flavor: tt.flag})
				return nil
			})
			if err != nil || f.Name != tt.want || !strings.Contains(f.why, tt.why) {
				t.Errorf("%q because %s, error %v; want %q because %s", f.Name, f.why, err, tt.want, tt.why)
			}
		})
	}
}

// TestForeignRulesDoNotHideKubeletsHint adds rules with nft to table mangle, which iptables-nft-save then
// cannot print, or cannot parse. iptables-legacy has more rules.
func TestForeignRulesDoNotHideKubeletsHint(t *testing.T) {
	for _, rule := range []string{"ct state new accept", "meta l4proto tcp meta mark set 4"} {
		h := netlab.NewHost(t)
		netlab.NeedPrograms(t, "iptables-nft", "iptables-legacy-save")
		for _, c := range [][]string{
			{"iptables-nft", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"},
			{"nft", "add chain ip mangle other; add rule ip mangle other " + rule},
			{"nft", "add table ip6 mangle; add chain ip6 mangle other; add rule ip6 mangle other " + rule},
			{"env", "XTABLES_LOCKFILE=" + filepath.Join(t.TempDir(), "lock"), "iptables-legacy", "-N", "X"},
			{"env", "XTABLES_LOCKFILE=" + filepath.Join(t.TempDir(), "lock"), "iptables-legacy", "-A", "X", "-j", "RETURN"},
		} {
			if out, err := h.Run(t, c[0], c[1:]...); err != nil {
				t.Fatalf("%v: %v: %s", c, err, out)
			}
		}
		var f Flavor
		must.Do(t, h.Do(func() error {
			f = ChooseFlavor(t.Context(), &config.Config{Mode: config.ModeIPTables, Flavor: iptables.AnyFlavor})
			return nil
		}))
		if f.Name != iptables.NFT || !strings.Contains(f.why, "KUBE-IPTABLES-HINT") {
			t.Errorf("%s: chose %q because %s", rule, f.Name, f.why)
		}
	}
}

// TestCleanupNamesWhatKeepsChains cleans up chains of kube-proxy that another program's verdict map, or its rule,
// leads to.
func TestCleanupNamesWhatKeepsChains(t *testing.T) {
	netlab.Require(t)
	netlab.NeedPrograms(t, "iptables-nft-restore", "ip6tables-nft-restore", "nft")
	node := netlab.NewHost(t)
	const rules = "*nat\n:KUBE-SERVICES -\n:KUBE-MARK-MASQ -\n:KUBE-POSTROUTING -\n:PORTALS -\n-A KUBE-SERVICES -j KUBE-MARK-MASQ\n-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n-A PORTALS -j KUBE-MARK-MASQ\nCOMMIT"
	run := func(script string) {
		t.Helper()
		must.Get(node.Run(t, "sh", "-e", "-c", script))(t)
	}
	var text strings.Builder
	log := slog.New(slog.NewTextHandler(&text, nil))
	cleanup := func() error {
		return node.Do(func() error { return IPTables().CleanupKubeProxy(t.Context(), log) })
	}
	run("iptables-nft-restore <<E\n" + rules + "\nE\nnft 'add map ip nat portals { type inet_service : verdict; elements = { 99 : jump KUBE-SERVICES }; }'")
	if err := cleanup(); err == nil || !strings.Contains(err.Error(), "map ip nat portals (to KUBE-SERVICES)") {
		t.Errorf("with a map: %v", err)
	}
	run("nft delete map ip nat portals")
	if err := cleanup(); err != nil || !strings.Contains(text.String(), `chain=KUBE-MARK-MASQ table=nat family=IPv4 rule="-A PORTALS -j KUBE-MARK-MASQ"`) {
		t.Errorf("with a rule: %v, log:\n%s", err, &text)
	}
}
