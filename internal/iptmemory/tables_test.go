package iptmemory

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

func saved(t *testing.T, tables *Tables, table string, options ...string) string {
	t.Helper()
	var out strings.Builder
	if err := tables.Save(t.Context(), table, &out, options...); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestRefusedInputsChangeNothing applies inputs that iptables-restore refuses.
func TestRefusedInputsChangeNothing(t *testing.T) {
	tables := New()
	if err := tables.Restore(t.Context(), []byte("*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A OUTPUT -s 10.0.0.0/8 -j A\nCOMMIT\n")); err != nil {
		t.Fatal(err)
	}
	before := saved(t, tables, "")
	for input, line := range map[string]int{
		"*nat\n-A A -j C\nCOMMIT\n":                           2, // no such chain
		"*nat\n-A A -j OUTPUT\nCOMMIT\n":                      2, // a built-in chain
		"*nat\n-A C -j B\nCOMMIT\n":                           2,
		"*nat\n:B - [0:0]\n-X B\nCOMMIT\n":                    3, // in use
		"*nat\n-X A\nCOMMIT\n":                                2, // not empty
		"*nat\n-X OUTPUT\nCOMMIT\n":                           2,
		"*nat\n:C - [0:0]\n-D OUTPUT -j A\nCOMMIT\n":          3, // no such rule
		"*nat\n-C A -j A\nCOMMIT\n":                           2,
		"*nat\n-I A 3 -j B\nCOMMIT\n":                         2,
		"*nat\n-A A --nonsense -j B\nCOMMIT\n":                2,
		"*nat\n-A A -s 10.0.0.0 -j B\nCOMMIT\n":               2,
		"*nat\n-A A -m comment --comment \"x -j B\nCOMMIT\n":  2,
		"*nat\n-A A -j DNAT --to-destination 10.0.0.\nCOMMIT": 2,
		"*nat\n-A A -j DROP --to-destination 1\nCOMMIT\n":     2,
		"*nat\n-N A\nCOMMIT\n":                                2,
		"*nat\n:" + strings.Repeat("x", 29) + " - [0:0]\n":    2,
		"*nat\n-P A DROP\nCOMMIT\n":                           2,
		"*raw\nCOMMIT\n":                                      1,
		"-A A -j B\n":                                         1,
		"*nat\n:C - [0:0]\n":                                  0, // no COMMIT
	} {
		err := tables.Restore(t.Context(), []byte(input))
		if e := (*iptool.Error)(nil); !errors.As(err, &e) || e.Line != line || e.Killed() {
			t.Errorf("%q: %v, want a refusal of line %d", input, err, line)
		}
		if now := saved(t, tables, ""); now != before {
			t.Fatalf("%q changed the tables:\n%s", input, now)
		}
	}
}

func TestInputsAreApplied(t *testing.T) {
	tables := New()
	commits := tables.Commits()
	for _, input := range []string{
		"*filter\n:A - [0:0]\n-A A -c 3 180 -j DROP\n-I OUTPUT 1 -j A\n-I OUTPUT 1 -j ACCEPT\nCOMMIT\n",
		"*filter\n-D OUTPUT -j ACCEPT\n-I OUTPUT 2 -j RETURN\nCOMMIT\n*nat\n:X - [0:0]\nCOMMIT\n",
	} {
		if err := tables.Restore(t.Context(), []byte(input)); err != nil {
			t.Fatal(err)
		}
	}
	if got := saved(t, tables, "filter", "-c"); !strings.Contains(got, "[0:0] -A OUTPUT -j A\n[0:0] -A OUTPUT -j RETURN\n[3:180] -A A -j DROP\n") {
		t.Errorf("saved\n%s", got)
	}
	if n := tables.Commits() - commits; n != 3 {
		t.Errorf("%d commits, want 3", n)
	}
	if tables.Count("filter", "OUTPUT") != 2 || tables.Count("filter", "NONE") != 0 || tables.Size("filter") != 7 {
		t.Errorf("%d rules, %d chains and rules", tables.Count("filter", "OUTPUT"), tables.Size("filter"))
	}
	commits = tables.Commits()
	for _, input := range []string{"*filter\n-C OUTPUT -j A\nCOMMIT\n", "*nat\n:Y - [0:0]\nCOMMIT\n"} {
		if err := tables.Restore(t.Context(), []byte(input), "--test"); err != nil || tables.Commits() != commits {
			t.Errorf("%q: %v, %d commits", input, err, tables.Commits()-commits)
		}
	}
	for _, command := range []string{"-t nat -A X -s 10.0.0.1 -j RETURN", "-F OUTPUT", "-F", "-X"} {
		if err := tables.Run(strings.Fields(command)...); err != nil {
			t.Errorf("%s: %v", command, err)
		}
	}
	if tables.Size("filter") != 3 || !strings.Contains(saved(t, tables, "nat"), "-A X -s 10.0.0.1/32 -j RETURN") {
		t.Errorf("after commands\n%s", saved(t, tables, ""))
	}
	if err := tables.Load("*nat\nCOMMIT\n"); err != nil || tables.Size("nat") != 4 {
		t.Errorf("Load: %v\n%s", err, saved(t, tables, "nat"))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tables.Restore(ctx, []byte("*nat\nCOMMIT\n")); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that is done: %v", err)
	}
}

// TestFaultsLeaveTheInputOrNot makes Before and After fail.
func TestFaultsLeaveTheInputOrNot(t *testing.T) {
	tables := New()
	fault := errors.New("fault")
	input := []byte("*nat\n:A - [0:0]\nCOMMIT\n")
	tables.Before = func(string) error { return fault }
	if err := tables.Restore(t.Context(), input); !errors.Is(err, fault) || tables.Commits() != 0 {
		t.Errorf("Before: %v, %d commits", err, tables.Commits())
	}
	tables.Before, tables.After = nil, func(string) error { return fault }
	if err := tables.Restore(t.Context(), input); !errors.Is(err, fault) || tables.Commits() != 1 {
		t.Errorf("After: %v, %d commits", err, tables.Commits())
	}
	if err := tables.Restore(t.Context(), []byte("*nat\n-C OUTPUT -j A\nCOMMIT\n")); err == nil || errors.Is(err, fault) {
		t.Errorf("a check: %v", err)
	}
}

// TestPacketsTakeEveryWay sends packets through rules that choose at random.
func TestPacketsTakeEveryWay(t *testing.T) {
	tables := New()
	if err := tables.Restore(t.Context(), []byte(`*nat
:SVC - [0:0]
:SEP-A - [0:0]
:SEP-B - [0:0]
:SEP-C - [0:0]
:MARK-MASQ - [0:0]
-A MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A SEP-A -s 10.0.0.1/32 -j MARK-MASQ
-A SEP-A -p tcp -m recent --set --name SEP-A --rsource -j DNAT --to-destination 10.0.0.1:80
-A SEP-B -p tcp -m recent --set --name SEP-B --rsource -j DNAT --to-destination 10.0.0.2:80
-A SEP-C -p tcp -m recent --set --name SEP-C --rsource -j DNAT --to-destination 10.0.0.3:80
-A SVC ! -s 10.0.0.0/8 -j MARK-MASQ
-A SVC -m recent --rcheck --seconds 60 --name SEP-A --rsource -j SEP-A
-A SVC -m recent --rcheck --seconds 60 --name SEP-B --rsource -j SEP-B
-A SVC -m recent --rcheck --seconds 60 --name SEP-C --rsource -j SEP-C
-A SVC -m statistic --mode random --probability 0.50000000000 -j SEP-A
-A SVC -m statistic --mode random --probability 0.66666666698 -j SEP-B
-A SVC -j SEP-C
-A PREROUTING -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j SVC
-A OUTPUT -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j SVC
-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
COMMIT
*filter
-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT
-A FORWARD -d 10.96.0.0/16 -j REJECT --reject-with icmp-port-unreachable
-A INPUT -s 203.0.113.0/24 -j DROP
COMMIT
`)); err != nil {
		t.Fatal(err)
	}
	send := func(from, in, to string) conformance.Outcome {
		return tables.Handle(ruleset.Packet{From: netip.MustParseAddr(from), InInterface: in, To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP, NodeAddresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}})
	}
	for _, in := range []string{"eth0", ""} {
		out := send("10.0.0.1", in, "10.96.0.1:80")
		if out.Action != ruleset.ActionForward || out.Affinity.Seconds() != 60 || len(out.Endpoints) != 3 {
			t.Fatalf("from %q: %+v", in, out)
		}
		for i, want := range []int{3, 2, 1} {
			if c := out.Endpoints[i]; c.Weight != want || c.Masquerade != (i == 0) {
				t.Errorf("from %q: %+v, want weight %d", in, c, want)
			}
		}
	}
	if out := send("192.0.2.9", "eth0", "10.96.0.1:80"); !out.Endpoints[2].Masquerade {
		t.Errorf("another source: %+v", out)
	}
	for to, want := range map[string]ruleset.Action{"10.96.0.1:81": ruleset.ActionReject, "198.51.100.1:80": ruleset.ActionPass} {
		if out := send("192.0.2.9", "eth0", to); out.Action != want {
			t.Errorf("%s: %v, want %v", to, out.Action, want)
		}
	}
	if out := send("203.0.113.9", "eth0", "192.0.2.1:22"); out.Action != ruleset.ActionDrop {
		t.Errorf("to the node: %v", out.Action)
	}
}

func TestWeightsAreTheSmallestIntegers(t *testing.T) {
	for _, want := range [][]int{{1}, {1, 1}, {1, 2}, {2, 3, 5}, {7, 100, 1000}} {
		sum := 0
		for _, w := range want {
			sum += w
		}
		shares, got := make([]float64, len(want)), make([]conformance.Choice, len(want))
		for i, w := range want {
			shares[i] = math.Round(float64(w)/float64(sum)*(1<<31)) / (1 << 31)
		}
		scale(got, shares)
		for i, w := range want {
			if got[i].Weight != w {
				t.Errorf("%v: %+v", want, got)
				break
			}
		}
	}
}
