package agent_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// firewall deletes all rules, as the reload of a firewall does, and tracks connections.
const firewall = `flush ruleset
table ip other {
	chain post {
		type nat hook postrouting priority 100
		oifname "pods" masquerade
	}
}
`

// TestUntranslatedConnectionsEndWithARepair connects to a Service before the agent has rules, and after another program
// has deleted them. The kernel does not translate the first packets, and would do the same with the retransmissions for
// two minutes.
func TestUntranslatedConnectionsEndWithARepair(t *testing.T) {
	netlab.Require(t)
	netlab.NeedPrograms(t, "nft", "ip", "sh")
	n := newNetwork(t, "10.1.0.2")
	run := func(name string, args ...string) {
		t.Helper()
		must.Get(n.node.Output(name, args...))(t)
	}
	n.node.Routes("", "10.1.0.99", "10.96.0.0/16") // nothing answers there
	run("ip", "neigh", "add", "10.1.0.99", "lladdr", "02:00:00:00:00:99", "dev", "pods")
	reload := func() { run("sh", "-c", "nft -f - <<'EOF'\n"+firewall+"EOF") }
	reload()
	var dials sync.WaitGroup
	dialing, stopDialing := context.WithCancel(t.Context())
	dial := func() {
		dials.Go(func() {
			if c, err := n.client.Dial(dialing, "tcp", "", "10.96.0.10:80"); err == nil {
				c.Close()
			}
		})
	}
	untranslated := func() bool {
		out, _ := n.node.Run(t, "conntrack", "-L", "-d", "10.96.0.10")
		return strings.Contains(out, "UNREPLIED] src=10.96.0.10")
	}
	dial()
	eventually(t, "an entry without translation", untranslated)

	stop := runAgent(t, agent.Options{
		Config: parse(t, "--proxy-mode", "nftables", "--hostname-override", "n1"), NetNS: n.node.File(),
		Source: objects("10.1.0.2"), Node: node(), Log: logTo(t),
	})
	eventually(t, "no entry without translation after the start", func() bool { return !untranslated() })

	eventually(t, "an entry without translation after the rules were deleted", func() bool {
		reload()
		for range 5 {
			dial()
		}
		return untranslated()
	})
	eventually(t, "no entry without translation after the repair", func() bool { return !untranslated() })
	if answer(n.client, "10.96.0.10:80") == "" {
		t.Error("the Service does not answer")
	}
	stopDialing()
	dials.Wait()
	must.Do(t, stop())
}
