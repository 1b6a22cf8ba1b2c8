//go:build linux

package ipvs

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// testOnlyBackendRulesAreOwned calls Owned with kube-proxy's chains and with the backend's.
func testOnlyBackendRulesAreOwned(t *testing.T) {
	netlab.NeedPrograms(t, "iptables-nft-restore", "iptables-nft-save", "ip6tables-nft-save")
	h := netlab.NewHost(t)
	c := Config{NetNS: h.File(), IPTables: iptables.NFT}
	owned := func(what string, want bool) {
		t.Helper()
		if got, err := Owned(t.Context(), c); err != nil || got != want {
			t.Errorf("%s: %v, error %v", what, got, err)
		}
	}
	restore := func(input string) {
		t.Helper()
		cmd := netlab.Command(t, "iptables-nft-restore", "--noflush")
		cmd.Stdin = strings.NewReader(input)
		if err := h.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	owned("empty tables", false)
	restore("*nat\n:KUBE-SERVICES -\n:KUBE-LOAD-BALANCER -\n:KUBE-NODE-PORT -\n-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n")
	owned("kube-proxy's", false)
	// The names of the backend's chains are enough.
	input, n := "", 0
	for _, table := range (rules{family: tracker.IPv4, mark: uint32(dataplane.DefaultMasqueradeMark), node: &ruleset.Node{}}).tables() {
		input += "*" + table.name + "\n"
		for _, chain := range table.chains {
			input += ":" + chain.name + " -\n"
			n++
		}
		input += "COMMIT\n"
	}
	if n < 10 {
		t.Fatalf("only %d chains", n)
	}
	restore(input)
	owned("a Backend's", true)
}
