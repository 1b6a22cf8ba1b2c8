package ipvs

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

var updateGoldens = flag.Bool("update", false, "rewrite the golden rules in testdata")

// goldenRules returns the rules of a node of each kind, by the name of its golden file.
func goldenRules() map[string]rules {
	out := map[string]rules{}
	add := func(name string, n *ruleset.Node) {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			out[fmt.Sprintf("rules-%s-%s", name, strings.ToLower(f.String()))] = rules{f, 0x4000, n}
		}
	}
	prefixes := func(list ...string) (out []netip.Prefix) {
		for _, s := range list {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	add("plain", &ruleset.Node{})
	add("cidr", &ruleset.Node{
		ServiceCIDRs: prefixes("10.96.0.0/16", "fd00:10:96::/112"),
		LocalTraffic: ruleset.LocalTraffic{CIDRs: prefixes("10.244.1.0/24", "10.245.1.0/24", "fd00:10:244:1::/64")},
	})
	add("prefix", &ruleset.Node{MasqueradeAll: true, LocalTraffic: ruleset.LocalTraffic{InterfacePrefix: "veth"}})
	add("bridge", &ruleset.Node{LocalTraffic: ruleset.LocalTraffic{Bridge: "cni0"}})
	return out
}

func TestRulesEqualGoldens(t *testing.T) {
	t.Parallel()
	for name, r := range goldenRules() {
		got := restoreAll(r.tables(), nil)
		path := filepath.Join("testdata", name)
		if *updateGoldens {
			must.Do(t, os.WriteFile(path, []byte(got), 0o644))
		}
		want := must.Get(os.ReadFile(path))(t)
		if got != string(want) {
			t.Errorf("%s differs (go test -run RulesEqualGoldens -update rewrites it):\n%s", path, got)
		}
	}
}

func TestHostileInterfaceNamesAreRejected(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a b", "x\n-A INPUT -j DROP", "cni0/", "-j", "averyveryverylongname", "veth+"} {
		for _, l := range []ruleset.LocalTraffic{{Bridge: name}, {InterfacePrefix: name}} {
			r := rules{tracker.IPv4, 0x4000, &ruleset.Node{LocalTraffic: l}}
			if r.validate() == nil {
				t.Errorf("%+v is valid", l)
			}
		}
	}
	r := rules{tracker.IPv4, 0x4000, &ruleset.Node{LocalTraffic: ruleset.LocalTraffic{Bridge: "cni0"}}}
	if err := r.validate(); err != nil {
		t.Error(err)
	}
}

func TestOwnRulesAreFoundInSavedRules(t *testing.T) {
	t.Parallel()
	tables := rules{tracker.IPv4, 0x4000, &ruleset.Node{}}.tables()
	saved := iptext.Parse(`# Generated
*mangle
:INPUT ACCEPT [1:2]
:KUBE-IPVS-IN - [0:0]
:KUBE-IPVS-INN - [0:0]
-A INPUT -j KUBE-IPVS-INN
-A INPUT -m comment --comment "kubernetes service portals" -j KUBE-IPVS-IN
-A KUBE-IPVS-IN -m conntrack ! --ctstate NEW -j RETURN
-A KUBE-IPVS-INN -j ACCEPT
COMMIT
*nat
:POSTROUTING ACCEPT [0:0]
-A POSTROUTING -j MASQUERADE
COMMIT
`)
	const own = `*mangle
-A INPUT -m comment --comment "kubernetes service portals" -j KUBE-IPVS-IN
-A KUBE-IPVS-IN -m conntrack ! --ctstate NEW -j RETURN
*nat
*filter
`
	if got := ownRules(tables, saved); got != own {
		t.Errorf("own rules:\n%s", got)
	}
	const remove = `*mangle
-D INPUT -m comment --comment "kubernetes service portals" -j KUBE-IPVS-IN
-F KUBE-IPVS-IN
-X KUBE-IPVS-IN
COMMIT
`
	if got := removeAll(tables, saved); got != remove {
		t.Errorf("remove:\n%s", got)
	}
	if got := removeAll(tables, nil); got != "" {
		t.Errorf("remove nothing:\n%s", got)
	}
	if got := restoreAll(tables, saved); strings.Contains(got, "-I INPUT 1 -m comment --comment \"kubernetes service portals\" -j KUBE-IPVS-IN\n") ||
		!strings.Contains(got, "-I OUTPUT 1 -m comment --comment \"kubernetes service portals\" -j KUBE-IPVS-OUT\n") {
		t.Errorf("restore:\n%s", got)
	}
}
