package takeover

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestModeOfServicesChain reads chains KUBE-SERVICES of kube-proxy and of nodeproxy beside each other's
// device of mode ipvs.
func TestModeOfServicesChain(t *testing.T) {
	netlab.Require(t)
	netlab.NeedPrograms(t, "iptables-nft-restore", "ipset")
	const (
		device = "ip link add kube-ipvs0 type veth\n"
		own    = "nft 'add table ip nat; add chain ip nat KUBE-IPVS-SERVICES; add rule ip nat KUBE-IPVS-SERVICES return'\n"
	)
	restore := func(rules string) string {
		return "iptables-nft-restore --noflush <<E\n" + rules + "\nE\n"
	}
	sets := "ipset create KUBE-CLUSTER-IP hash:ip,port\n" +
		restore("*nat\n:KUBE-SERVICES -\n-A KUBE-SERVICES -m comment --comment set -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\nCOMMIT")
	addresses := restore("*nat\n:KUBE-SERVICES -\n-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment set -m tcp --dport 80 -j ACCEPT\nCOMMIT")
	nodeproxys := restore("*filter\n:KUBE-SERVICES -\n:KUBE-CLUSTER-IPS -\n-A KUBE-SERVICES -j KUBE-CLUSTER-IPS\nCOMMIT")
	for _, c := range []struct{ name, script, want string }{
		{"nothing", "", ""},
		{"kube-proxy's mode ipvs", device + sets, "kube-proxy ipvs"},
		{"kube-proxy's mode ipvs, adopted", device + sets + own, "kube-proxy ipvs, nodeproxy ipvs"},
		{"kube-proxy's mode ipvs, without its device", sets, "kube-proxy ipvs"},
		{"kube-proxy's mode iptables", addresses, "kube-proxy iptables"},
		{"kube-proxy's mode iptables beside mode ipvs", device + own + addresses, "kube-proxy iptables, nodeproxy ipvs"},
		{"an emptied chain that a rule leads to", restore("*nat\n:KUBE-SERVICES -\n:X -\n-A X -j KUBE-SERVICES\nCOMMIT\n*filter\n:KUBE-SERVICES -\nCOMMIT"), ""},
		{"mode iptables", addresses + nodeproxys, "nodeproxy iptables"},
		{"mode iptables over kube-proxy's mode ipvs", device + sets + nodeproxys, "kube-proxy ipvs, nodeproxy iptables"},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := netlab.NewHost(t)
			must.Get(node.Run(t, "sh", "-e", "-c", c.script+":"))(t)
			var all map[Kind]uint64
			must.Do(t, node.Do(func() (err error) {
				all, err = Look(t.Context(), nil, false)
				return err
			}))
			var got []string
			for kind := range maps.Keys(all) {
				got = append(got, string(kind.Owner)+" "+kind.Mode)
			}
			slices.Sort(got)
			if got := strings.Join(got, ", "); got != c.want {
				t.Errorf("rules of %q, want %q", got, c.want)
			}
		})
	}
}

func TestMain(m *testing.M) { netlab.Main(m) }

// TestMarkersWithManyOpenFiles makes and deletes markers in a process with more than 1,024
// open files, such as the listeners of health-check node ports.
func TestMarkersWithManyOpenFiles(t *testing.T) {
	netlab.Require(t)
	netlab.ManyFiles(t)
	node := netlab.NewHost(t)
	marked := func() []tracker.Family {
		t.Helper()
		var out []tracker.Family
		must.Do(t, node.Do(func() (err error) {
			out, err = Marked()
			return err
		}))
		return out
	}
	must.Do(t, node.Do(func() error { return Mark([]tracker.Family{tracker.IPv4, tracker.IPv6}, false) }))
	if got := marked(); len(got) != 2 {
		t.Errorf("markers %v after Mark", got)
	}
	must.Do(t, node.Do(func() error { return Unmark() }))
	if got := marked(); len(got) != 0 {
		t.Errorf("markers %v after Unmark", got)
	}
}
