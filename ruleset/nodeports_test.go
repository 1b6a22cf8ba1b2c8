package ruleset

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

func TestParsedNodePortAddressesResolve(t *testing.T) {
	info := tracker.NodeInfo{Addresses: addrs("192.0.2.1", "127.0.0.1", "192.0.2.1", "2001:db8::1")}
	all := NodePorts{All: true}
	some := func(list ...string) NodePorts {
		n := NodePorts{Prefixes: prefixes(list...)}
		if n.Prefixes == nil {
			n.Prefixes = []netip.Prefix{}
		}
		return n
	}
	local := func(n NodePorts, list ...string) NodePorts {
		n.Loopback = prefixes(list...)
		return n
	}
	for _, c := range []struct {
		name   string
		values []string
		info   tracker.NodeInfo
		v4, v6 NodePorts
	}{
		{"nothing", nil, info, all, all},
		{"empty", []string{}, info, all, all},
		{"primary", []string{"primary"}, info, some("192.0.2.1/32"), some("2001:db8::1/128")},
		{"primary of one family", []string{"primary"}, tracker.NodeInfo{Addresses: addrs("192.0.2.1")}, some("192.0.2.1/32"), some()},
		{"primary, no addresses", []string{"primary"}, tracker.NodeInfo{}, some(), some()},
		{"one family", []string{"192.0.2.77/24"}, info, some("192.0.2.0/24"), all},
		{"both", []string{"2001:db8::/64", "192.0.2.0/24", "192.0.2.0/25"}, info, some("192.0.2.0/24"), some("2001:db8::/64")},
		{"a zero CIDR wins", []string{"192.0.2.0/24", "0.0.0.0/0", "2001:db8::/64"}, info, all, some("2001:db8::/64")},
		{"both zero", []string{"0.0.0.0/0", "::/0"}, info, all, all},
		{"loopback", []string{"127.0.0.0/8", "::1/128"}, info, local(some(), "127.0.0.0/8"), local(some(), "::1/128")},
		{"localhost", []string{"localhost"}, info, local(some(), "127.0.0.0/8"), local(some(), "::1/128")},
		{"one loopback address", []string{"127.0.0.1/32", "127.0.0.1/32"}, info, local(some(), "127.0.0.1/32"), all},
		{"everything", []string{"all"}, info, all, all},
		{"everything with loopback", []string{"all", "localhost"}, info, local(all, "127.0.0.0/8"), local(all, "::1/128")},
		{"primary and more", []string{"10.0.0.0/8", "primary", "localhost"}, info, local(some("10.0.0.0/8", "192.0.2.1/32"), "127.0.0.0/8"), local(some("2001:db8::1/128"), "::1/128")},
		{"loopback and more", []string{"127.0.0.0/8", "192.0.2.0/24"}, info, local(some("192.0.2.0/24"), "127.0.0.0/8"), all},
	} {
		n, err := ParseNodePortAddresses(c.values)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := n.Resolve(c.info, tracker.IPv4); !reflect.DeepEqual(got, c.v4) {
			t.Errorf("%s: IPv4 %+v, want %+v", c.name, got, c.v4)
		}
		if got := n.Resolve(c.info, tracker.IPv6); !reflect.DeepEqual(got, c.v6) {
			t.Errorf("%s: IPv6 %+v, want %+v", c.name, got, c.v6)
		}
	}
	for _, bad := range [][]string{{"primary", "10.0.0.0"}, {"Primary"}, {""}, {"10.0.0.1"}, {"10.0.0.0/33"}, {"eth0"}, {"::ffff:10.0.0.0/104"}, {"all", "10.0.0.0/8", "all"}, {"primary", "primary"}, {"localhost", "localhost"}} {
		if _, err := ParseNodePortAddresses(bad); !errors.Is(err, ErrConfig) {
			t.Errorf("%q: error %v", bad, err)
		}
	}
}

func TestNodePortsAllowOnlyTheirAddresses(t *testing.T) {
	within := NodePorts{Prefixes: prefixes("192.0.2.0/24", "126.0.0.0/7")}
	for _, c := range []struct {
		n    NodePorts
		addr string
		want bool
	}{
		{NodePorts{}, "192.0.2.1", false},
		{NodePorts{All: true}, "192.0.2.1", true},
		{NodePorts{All: true}, "127.0.0.1", false},
		{NodePorts{All: true}, "::1", false},
		{within, "192.0.2.1", true},
		{within, "::ffff:192.0.2.1", true},
		{within, "192.0.3.1", false},
		{within, "127.0.0.1", false},
	} {
		if got := c.n.Allows(netip.MustParseAddr(c.addr)); got != c.want {
			t.Errorf("%+v allows %s: %v", c.n, c.addr, got)
		}
	}
}
