//go:build linux

package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// testLookupFindsVirtualServers compares Lookup with a delta, and with later changes by
// ipvsadm(8) and ip(8).
func testLookupFindsVirtualServers(t *testing.T) {
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	look := func(to string, internal bool) (dataplane.Found, error) {
		t.Helper()
		return Lookup(t.Context(), Config{NetNS: r.host().File()}, dataplane.Query{
			Packet:   ruleset.Packet{To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP},
			Internal: internal, NodePort: strings.HasSuffix(to, ":30001"),
		})
	}
	if _, err := look("10.96.0.1:80", false); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("before the first delta: %v, want ErrNoRules", err)
	}
	r.set(svc(1, nodePort(30001), externalLocal), 1, 1, -1)
	r.sync()
	finds := func(to string, internal bool, where string, endpoints ...string) {
		t.Helper()
		want := dataplane.Found{Entry: where != "", Where: where}
		for _, e := range endpoints {
			want.Endpoints = append(want.Endpoints, netip.MustParseAddrPort(e))
		}
		got, err := look(to, internal)
		if err != nil || got.Entry != want.Entry || got.Where != want.Where || got.Service != "" || !slices.Equal(got.Endpoints, want.Endpoints) {
			t.Errorf("%s, internal %v: %+v, error %v, want %+v", to, internal, got, err, want)
		}
	}
	const local, remote = "10.244.1.1:8080", "10.245.0.1:8080"
	finds("10.96.0.1:80", false, "virtual server TCP 10.96.0.1:80, scheduler rr", local, remote)
	finds("10.96.0.1:80", true, "virtual server TCP 10.96.0.1:80, scheduler rr", local, remote)
	finds("192.0.2.1:30001", false, "virtual server TCP 192.0.2.1:30001, scheduler rr", local)
	finds("192.0.2.1:30001", true, "virtual server FWM 12289 IPv4, for internal traffic to TCP 192.0.2.1:30001, scheduler rr", local, remote)
	finds("10.96.0.1:81", false, "")
	finds("192.0.2.1:30002", true, "")
	finds("[fd00:96::2]:80", true, "")

	r.run("ipvsadm -e -t 10.96.0.1:80 -r " + remote + " -m -w 0")
	finds("10.96.0.1:80", false, "virtual server TCP 10.96.0.1:80, scheduler rr", local)
	r.run("ip addr del 10.96.0.1/32 dev " + deviceName)
	var drift *dataplane.DriftError
	if _, err := look("10.96.0.1:80", false); !errors.As(err, &drift) || !strings.Contains(drift.What, "10.96.0.1 is bound to no device") {
		t.Errorf("without the address: %v, want a DriftError", err)
	}
	r.run("ipset flush KUBE-SHORT-CIRCUIT")
	finds("192.0.2.1:30001", true, "virtual server TCP 192.0.2.1:30001, scheduler rr", local)

	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	q := dataplane.Query{Packet: ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: v1.ProtocolTCP}}
	if _, err := Lookup(canceled, Config{NetNS: r.host().File()}, q); !errors.Is(err, context.Canceled) {
		t.Errorf("with a canceled context: %v", err)
	}
}
