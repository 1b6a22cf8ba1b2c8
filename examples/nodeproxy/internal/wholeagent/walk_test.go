//go:build linux

package wholeagent

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestTopAndTraceFindTheFaultsOfTheReadme follows the commands of the README. With top and
// trace alone it finds a Service whose traffic goes to one endpoint only, a Service that
// refuses connections, and a Service whose packets another program's chain drops.
func TestTopAndTraceFindTheFaultsOfTheReadme(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "nft")
	d, _, flags := newDemoSite(t)
	flags = flags[:len(flags)-2] // without --min-sync-period
	const guard = "table inet guard { chain forward { type filter hook forward priority 0; ip daddr 10.1.2.0/24 tcp dport 8080 drop; }; }"
	if _, err := d.Node.Run(t, "nft", guard); err != nil {
		t.Fatal(err)
	}
	s := &site{Lab: d}
	s.Client = d.Pod1
	const cart, empty, web = "10.96.0.30:80", "10.96.0.40:80", "10.96.0.10:80"

	// top shows that a Service has no endpoints and refuses connections.
	s.refused(t, empty)
	rows := topRows(t, d.Node)
	if r := rows["shop/empty IPv4"]; r["ready"] != 0.0 || r["refused"] != 1.0 {
		t.Errorf("shop/empty: %v", r)
	}
	code, out := runTrace(t, d.Node, func() { s.refused(t, empty) }, append(flags, "--count", "1", empty)...)
	contains(t, out, "kernel: refused: table ip proxier, chain no-endpoints, rule handle ", "must: reject: cluster IP of shop/empty:http/TCP/IPv4 has no endpoints on any node", "AGREE")
	if code != 0 {
		t.Errorf("empty: exit status %d", code)
	}

	// The packets of two in three connections to web are dropped.
	code, out = runTrace(t, d.Node, func() {
		for range 30 {
			if c, err := lab.Dial(d.Pod1, "tcp", "", web, lab.NoAnswerTimeout/3); err == nil {
				c.Close()
			}
		}
	}, append(flags, "--count", "30", web)...)
	contains(t, out, "kernel: DROPPED by a chain of another program: table inet guard, chain forward, rule handle ",
		"kernel: that rule: ip daddr 10.1.2.0/24 tcp dport 8080 drop\n", "DIFFERS: stopped by another program: table inet guard, chain forward\n",
		"endpoint 10.1.1.2:8080 got ", "kernel and objects DIFFER for ")
	if code != 1 {
		t.Errorf("web: exit status %d", code)
	}

	// All connections to cart go to one endpoint, and trace shows why.
	if _, err := d.Node.Run(t, "nft", "delete table inet guard"); err != nil {
		t.Fatal(err)
	}
	if r := topRows(t, d.Node)["shop/cart IPv4"]; r["ready"] != 3.0 {
		t.Errorf("shop/cart: %v", r)
	}
	code, out = runTrace(t, d.Node, func() {
		for range 5 {
			if _, _, err := lab.Visit(d.Pod2, "", cart); err != nil {
				t.Error(err)
			}
		}
	}, append(flags, "--count", "5", cart)...)
	contains(t, out, "must: affinity: to the same endpoint for 10m0s\n", ":8080 got 5 of 5: 5 answered\n", "5 connections: 5 forwarded, 0 refused, 0 neither; kernel and objects AGREE")
	if code != 0 || strings.Count(out, " got ") != 1 {
		t.Errorf("cart: exit status %d, output:\n%s", code, out)
	}
}
