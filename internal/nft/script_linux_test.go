package nft

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// script has every kind of line that Script knows.
const script = `table inet test
delete table inet test
table ip other
delete table ip other
table inet test
flush table inet test
table inet test {
	set addresses {
		type ipv6_addr . inet_service . ipv6_addr . inet_service
		flags timeout
	}
	chain input {
		type filter hook input priority 97; policy accept;
		ct state new meta mark & 0x3000 == 0x3000 meta mark set meta mark & 0x3fff
	}
	chain output {
		type filter hook output priority -99; policy accept;
		meta nfproto ipv6 meta l4proto tcp ct status dnat ct original ip6 daddr . ct original proto-dst . ip6 daddr . tcp dport @addresses counter reject with tcp reset
		meta nfproto ipv4 meta l4proto udp ip saddr == 10.0.0.0/8 counter drop
	}
}
`

// TestScriptEqualsTool compares the table of a script with the one that the nft tool makes of it.
func TestScriptEqualsTool(t *testing.T) {
	_, hosts := netlab.NewHosts(t, "tool", "package")
	cmd := netlab.Command(t, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if err := hosts["tool"].Do(cmd.Run); err != nil {
		t.Fatal(err)
	}
	conn, err := Dial(hosts["package"].File(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 2 { // the second time there is a table to replace
		b := &Batch{}
		b.Reset()
		if err := b.Script(script); err != nil {
			t.Fatal(err)
		}
		if err := conn.Commit(b); err != nil {
			t.Fatal(err)
		}
	}
	var listings [2]string
	for i, h := range []*netlab.Host{hosts["tool"], hosts["package"]} {
		if listings[i], err = h.Run(t, "nft", "list ruleset"); err != nil {
			t.Fatal(err)
		}
		c, err := Dial(h.File(), 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		list, err := c.Rules("test", unix.NFPROTO_INET)
		if err != nil || len(list) != 3 {
			t.Fatalf("rules %v, error %v", list, err)
		}
	}
	if listings[0] != listings[1] {
		t.Errorf("the tool has\n%s\nthe package\n%s", listings[0], listings[1])
	}
	if sets, err := conn.Sets("test", unix.NFPROTO_INET); err != nil || sets["addresses"].Flags != unix.NFT_SET_TIMEOUT|setConcat {
		t.Errorf("sets %v, error %v", sets, err)
	}
}

// TestUnknownScriptsDoNotCompile has texts that the nft tool refuses or Script does not know.
func TestUnknownScriptsDoNotCompile(t *testing.T) {
	for _, text := range []string{
		"table bridge x", "table inet x {\nset s {\ntype ether_addr\n", "table inet x {\nset s {\nflags constant\n",
		"table inet x {\nchain c {\ntype filter\n", "table inet x {\nchain c {\nlog\n",
	} {
		b := &Batch{}
		b.Reset()
		if err := b.Script(text); err == nil {
			t.Errorf("%q compiles", text)
		}
	}
	if types, err := ParseTypes("ipv4_addr . mark . ifname"); err != nil || !slices.Equal(types, []uint32{TypeIPv4, TypeMark, TypeIfname}) {
		t.Errorf("types %v, error %v", types, err)
	}
}
