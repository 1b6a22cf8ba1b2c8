package objects

import (
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestOwnAddressesComeFromDefaultRoutes(t *testing.T) {
	lab, hosts := netlab.NewHosts(t, "node", "peer")
	h, peer := hosts["node"], hosts["peer"]
	check := func(what string, want ...string) {
		t.Helper()
		var got []string
		err := h.Do(func() error {
			nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			defer nl.Close()
			addrs, err := ownAddresses(nl)
			for _, a := range addrs {
				got = append(got, a.String())
			}
			return err
		})
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, error %v, want %v", what, got, err, want)
		}
	}
	check("with nothing but a loopback interface")
	lab.Link(h, "eth0", peer, "eth0")
	h.Addrs("eth0", "192.0.2.1/24", "198.51.100.1/24", "2001:db8::1/64", "2001:db8:1::1/64")
	h.Addrs("lo", "203.0.113.1/32")
	check("without a default route", "192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "2001:db8:1::1")
	h.Routes("", "198.51.100.2", "0.0.0.0/0")
	h.Routes("", "2001:db8:1::2", "::/0")
	check("with default routes", "198.51.100.1", "2001:db8:1::1")
}

func TestMain(m *testing.M) { netlab.Main(m) }
