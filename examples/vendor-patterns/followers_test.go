package patterns_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// flows is a data plane's own table of flows. By default a conntrack.Cleaner uses the
// kernel's table.
type flows []conntrack.Flow

func (t flows) Dump(_ context.Context, _ tracker.Family, see func(*conntrack.Flow)) error {
	for i := range t {
		see(&t[i])
	}
	return nil
}

func (t flows) Delete(_ context.Context, stale []conntrack.Flow) (int, error) {
	for _, f := range stale {
		fmt.Println("ended the flow of", f.Src, "to", f.ReplySrc)
	}
	return len(stale), nil
}

func (t flows) LocalAddrs(context.Context, tracker.Family) ([]netip.Addr, error) { return nil, nil }

// A data plane fails at first. The clean-up of flows and the health check wait for it.
func Example_followers() {
	t, engine := newEngine(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	busy := true
	plane := ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		if busy {
			return errors.New("the switch is busy")
		}
		fmt.Println("data plane:", len(d.Changes), "change")
		return nil
	})

	client, vip := netip.MustParseAddrPort("10.1.0.1:4000"), netip.MustParseAddrPort("10.96.0.10:80")
	gone := netip.MustParseAddrPort("10.0.0.2:8080")
	table := flows{{Protocol: 17, Src: client, Dst: vip, ReplySrc: gone, ReplyDst: client}}
	cleaner := must(conntrack.New(context.Background(), conntrack.Config{Table: table}))
	defer cleaner.Close()
	checks := health.NewServices(health.ServicesConfig{})

	// The clean-up runs after the data plane: a flow may end only when the new rules
	// handle its next packet. An agent that must not wait for it runs cleaner.Run in a goroutine,
	// instead of Flush. The health check says what the data plane has in effect.
	rules := engine.Attach("switch", cleaner.Wrap(plane))
	state := rules.Follow("health", checks)
	name := types.NamespacedName{Namespace: "shop", Name: "dns"}
	sync := func() {
		ctx := context.Background()
		if err := errors.Join(ruleset.SyncAll(ctx, rules, state), cleaner.Flush(ctx)); err != nil {
			fmt.Println(err)
		}
		answer := httptest.NewRecorder()
		checks.Handler(name, tracker.IPv4).ServeHTTP(answer, httptest.NewRequest("GET", "/", nil))
		fmt.Println("health check:", answer.Code)
	}

	dns := service("dns", vip.Addr().String())
	dns.Spec.Ports[0].Protocol = v1.ProtocolUDP
	dns.Spec.Type = v1.ServiceTypeLoadBalancer
	dns.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	dns.Spec.HealthCheckNodePort = 32000
	eps := slice("dns", "node-a")
	eps.Ports[0].Protocol = new(v1.ProtocolUDP)
	t.SetService(dns)
	t.SetSlice(eps)
	sync()
	busy = false
	sync()
	// Output:
	// ruleset: sync switch: the switch is busy
	// health check: 503
	// data plane: 1 change
	// ended the flow of 10.1.0.1:4000 to 10.0.0.2:8080
	// health check: 200
}
