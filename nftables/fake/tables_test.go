package fake

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

const small = `create table ip t
table ip t {
	map services {
		type ipv4_addr . inet_proto . inet_service : verdict
		size 2
	}
	chain drops {
		drop
	}
	chain in {
		type filter hook input priority 0; policy accept;
		ip daddr . meta l4proto . th dport vmap @services
	}
}
create element ip t services {
	10.0.0.1 . tcp . 80 : goto drops
}
`

// TestLoadRefuses loads texts that the kernel refuses. They must change nothing.
func TestLoadRefuses(t *testing.T) {
	tables := New()
	if err := tables.Load(small); err != nil {
		t.Fatal(err)
	}
	before := tables.List()
	if !strings.Contains(before, "\t\telements = {\n\t\t\t10.0.0.1 . tcp . 80 : goto drops\n\t\t}\n") {
		t.Errorf("listing:\n%s", before)
	}
	element := func(verb, e string) string { return verb + " element ip t services {\n\t" + e + "\n}\n" }
	for text, want := range map[string]syscall.Errno{
		"delete table ip6 t":                                  syscall.ENOENT,
		"delete chain ip t drops":                             syscall.EBUSY, // an element leads to it
		"delete set ip t services":                            syscall.EBUSY, // a rule looks it up
		"flush chain ip t none":                               syscall.ENOENT,
		"add rule ip t none drop":                             syscall.ENOENT,
		"insert rule ip t in goto none":                       syscall.ENOENT,
		"add rule ip t in ip daddr @none":                     syscall.ENOENT,
		"add rule ip t in log":                                syscall.EOPNOTSUPP,
		"add element ip t none {\n\t1\n}\n":                   syscall.ENOENT,
		element("create", "10.0.0.1 . tcp . 80 : goto drops"): syscall.EEXIST,
		element("add", "10.0.0.1 . tcp . 80 : goto in"):       syscall.EEXIST,
		element("create", "10.0.0.2 . tcp . 80 : goto drops,\n\t10.0.0.3 . tcp . 80 : goto drops"): syscall.ENFILE,
	} {
		if err := tables.Load("add table ip other\n" + text); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", text, err, want)
		}
		if after := tables.List(); after != before {
			t.Fatalf("%q changed the tables:\n%s", text, after)
		}
	}
}

// TestOwnRulesMeetPackets loads rules of a vendor's own.
func TestOwnRulesMeetPackets(t *testing.T) {
	tables := New()
	p := ruleset.Packet{
		From: netip.MustParseAddr("10.0.0.9"), InInterface: "eth0", Protocol: "TCP", To: netip.MustParseAddrPort("10.0.0.1:80"),
		NodeAddresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")},
	}
	for _, step := range []struct {
		text string
		want ruleset.Action
	}{
		{"", 0}, {small, ruleset.ActionDrop},
		{"insert rule ip t in ip saddr == 10.0.0.0/24 return", 0},
		{"flush chain ip t in", 0},
		{"add rule ip t in iifname != \"lo\" jump drops", ruleset.ActionDrop},
		{"delete table ip t", 0},
	} {
		if err := tables.Load(step.text); err != nil {
			t.Fatal(err)
		}
		if got := tables.Handle(p); got.Action != step.want {
			t.Errorf("after %q: %v", step.text, got)
		}
	}
}

// TestSharesOfRandomChoices draws from two buckets of three, and then from all.
func TestSharesOfRandomChoices(t *testing.T) {
	tables := New()
	err := tables.Load(`table ip t {
	map endpoints {
		typeof numgen random mod 1 : ip daddr . tcp dport
	}
	chain in {
		type nat hook prerouting priority -100; policy accept;
		dnat ip to numgen random mod 3 map @endpoints
		dnat ip to numgen random mod 1 map @endpoints
	}
}
create element ip t endpoints {
	0 : 10.0.0.1 . 80,
	1 : 10.0.0.2 . 80
}
`)
	if err != nil {
		t.Fatal(err)
	}
	got := tables.Handle(ruleset.Packet{From: netip.MustParseAddr("10.0.0.9"), InInterface: "eth0", Protocol: "TCP", To: netip.MustParseAddrPort("10.0.0.1:80")})
	want := map[string]int{"10.0.0.1:80": 2, "10.0.0.2:80": 1}
	if len(got.Endpoints) != 2 || got.Action != ruleset.ActionForward {
		t.Fatal(got)
	}
	for _, c := range got.Endpoints {
		if c != (conformance.Choice{Addr: c.Addr, Weight: want[c.Addr.String()]}) {
			t.Errorf("%+v", c)
		}
	}
}
