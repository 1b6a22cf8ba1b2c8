package ipvs

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestInvalidConfigsAreRejected(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]Config{
		"no family":               {Families: []tracker.Family{}},
		"a family twice":          {Families: []tracker.Family{tracker.IPv4, tracker.IPv4}},
		"unknown family":          {Families: []tracker.Family{5}},
		"a long scheduler":        {Scheduler: "sixteen_bytes_ab"},
		"a hostile scheduler":     {Scheduler: "rr\n"},
		"a scheduler's path":      {Scheduler: "../rr"},
		"negative timeout":        {Timeouts: Timeouts{TCP: -1}},
		"timeout below a second":  {Timeouts: Timeouts{UDP: time.Millisecond}},
		"timeout of months":       {Timeouts: Timeouts{TCPFin: 1000 * time.Hour}},
		"negative limit":          {DrainLimit: -1},
		"invalid CIDR":            {ExcludeCIDRs: []netip.Prefix{{}}},
		"two masquerade bits":     {MasqueradeMark: 3},
		"masquerade bit in marks": {MasqueradeMark: 1 << 12},
		"masquerade bit of marks": {MasqueradeMark: 1 << 11},
		"unknown iptables":        {IPTables: "ebtables"},
	} {
		if _, err := New(t.Context(), c); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c, err := Config{}.withDefaults()
	if err != nil || c.MasqueradeMark != 0x4000 || len(c.Families) != 2 {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestSysctlsDependOnTheKernel(t *testing.T) {
	t.Parallel()
	names := func(c Config, release string) map[string]string {
		out := map[string]string{}
		for _, s := range c.parameters(release) {
			out[s.name] = s.value
		}
		return out
	}
	always := map[string]string{
		"net/ipv4/vs/conntrack": "1", "net/ipv4/vs/expire_nodest_conn": "1", "net/ipv4/vs/expire_quiescent_template": "1",
		"net/ipv4/ip_forward": "1",
	}
	for release, mode := range map[string]string{
		"3.10.0-1160.el7": "", "4.0.9": "", "4.1.0": "0", "4.19.0-26-amd64": "0", "5.8.18": "0", "5.9.0": "", "6.1.0-56-amd64": "", "strange": "",
	} {
		got := names(Config{Families: []tracker.Family{tracker.IPv4, tracker.IPv6}}, release)
		if got["net/ipv4/vs/conn_reuse_mode"] != mode {
			t.Errorf("%s: conn_reuse_mode %q, want %q", release, got["net/ipv4/vs/conn_reuse_mode"], mode)
		}
		delete(got, "net/ipv4/vs/conn_reuse_mode")
		if !reflect.DeepEqual(got, always) {
			t.Errorf("%s: %v", release, got)
		}
	}
	got := names(Config{Families: []tracker.Family{tracker.IPv6}, StrictARP: true}, "6.1")
	if _, ok := got["net/ipv4/ip_forward"]; ok || got["net/ipv4/conf/all/arp_ignore"] != "1" || got["net/ipv4/conf/all/arp_announce"] != "2" {
		t.Errorf("%v", got)
	}
}

func TestSetNamesMatchKubeProxy(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for id := range setCount {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			n := id.name(f)
			if len(n) > maxSetName || seen[n] {
				t.Errorf("set %d: name %q is too long or another's", id, n)
			}
			seen[n] = true
		}
	}
	// These names are kube-proxy's.
	for id, want := range map[setID][2]string{
		setLoopBack:               {"KUBE-LOOP-BACK", "KUBE-6-LOOP-BACK"},
		setLoadBalancerSourceCIDR: {"KUBE-LOAD-BALANCER-SOURCE-CIDR", "KUBE-6-LOAD-BALANCER-SOURCE-CID"},
		setNodePortLocalSCTP:      {"KUBE-NODE-PORT-LOCAL-SCTP-HASH", "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS"},
	} {
		if got := [2]string{id.name(tracker.IPv4), id.name(tracker.IPv6)}; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
