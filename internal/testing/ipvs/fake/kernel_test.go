package fake

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
)

// TestLinesAreRefusedAsByTheKernel applies lines about objects that exist or are missing.
func TestLinesAreRefusedAsByTheKernel(t *testing.T) {
	k := New()
	ok := func(program, text string) {
		t.Helper()
		if err := k.Apply(program, text); err != nil {
			t.Fatal(err)
		}
	}
	ok("ipvsadm -R", "-A -t 10.96.0.1:80 -s rr\n-a -t 10.96.0.1:80 -r 10.1.0.1:80 -m -w 1\n-A -f 5 -6 -s mh -b mh-fallback,mh-port\n--set 9 0 0\n")
	ok("ipset restore", "create A hash:ip,port family inet maxelem 1 skbinfo\nadd A 10.96.0.1,tcp:80 skbmark 0x3001\ncreate B hash:ip\n")
	ok("ip -batch -", "link add kube-ipvs0 type dummy\naddr add 10.96.0.1/32 dev kube-ipvs0\n")
	ok("iptables-restore --noflush", "*filter\n-A INPUT -m set --match-set B dst -j DROP\nCOMMIT\n")
	before := list(t, k)
	for line, want := range map[string]error{
		"ipvsadm -A -t 10.96.0.1:80 -s rr":           syscall.EEXIST,
		"ipvsadm -E -t 10.96.0.2:80 -s rr":           syscall.ESRCH,
		"ipvsadm -a -t 10.96.0.1:80 -r 10.1.0.1:80":  syscall.EEXIST,
		"ipvsadm -e -t 10.96.0.1:80 -r 10.1.0.2:80":  syscall.ENOENT,
		"ipvsadm -d -t 10.96.0.1:80 -r 10.1.0.2:80":  syscall.ENOENT,
		"ipvsadm -D -f 5":                            syscall.ESRCH, // the family differs
		"ipvsadm -A -t 10.96.0.3:80 -s rr -b rr-odd": errUnknown,
		"ipset create A hash:ip,port":                syscall.EEXIST,
		"ipset create A hash:ip -exist":              syscall.EEXIST,
		"ipset add A 10.96.0.2,tcp:80":               ErrFull,
		"ipset add A 10.96.0.1,tcp:80":               syscall.EEXIST,
		"ipset del A 10.96.0.2,tcp:80":               syscall.ENOENT,
		"ipset add B 10.96.0.1 skbmark 1":            syscall.EINVAL,
		"ipset add C 10.96.0.1":                      syscall.ENOENT,
		"ipset destroy B":                            syscall.EBUSY,
		"ip addr add 10.96.0.1/32 dev kube-ipvs0":    syscall.EEXIST,
		"ip addr del 10.96.0.2/32 dev kube-ipvs0":    syscall.EADDRNOTAVAIL,
		"ip addr add 10.96.0.2/32 dev none":          syscall.ENODEV,
		"ip link add kube-ipvs0 type dummy":          syscall.EEXIST,
	} {
		program, text, _ := strings.Cut(line, " ")
		if err := k.Apply(program, text); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", line, err, want)
		}
		if now := list(t, k); !slices.Equal(now, before) {
			t.Fatalf("%s changed the kernel:\n%s", line, strings.Join(now, "\n"))
		}
	}
	ok("ipset restore", "create A hash:ip,port -exist\nadd A 10.96.0.1,tcp:80 skbmark 0x3002 -exist\ndel A 10.96.0.2,tcp:80 -exist\n")
	want := []string{
		"-A -f 5 -6 -s mh -b mh-fallback,mh-port", "-A -t 10.96.0.1:80 -s rr", "-a -t 10.96.0.1:80 -r 10.1.0.1:80 -m -w 1",
		"create A hash:ip,port family inet maxelem 1 skbinfo", "add A 10.96.0.1,tcp:80 skbmark 0x3002", "create B hash:ip family inet maxelem 65536",
		"1: kube-ipvs0 inet 10.96.0.1/32",
	}
	if got := list(t, k); !slices.Equal(got, want) || k.Timeouts != [3]int{9, 0, 0} {
		t.Errorf("listed\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// list returns what the tools list, except for iptables-save.
func list(t *testing.T, k *Kernel) (out []string) {
	for _, c := range []string{"ipvsadm -Sn", "ipset save", "ip -o addr show dev kube-ipvs0"} {
		args := strings.Fields(c)
		text, err := k.Run(args[0], args[1:]...)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, strings.Split(strings.TrimSpace(text), "\n")...)
	}
	return out
}

// TestFaultsLeaveTheLineOut makes Before fail.
func TestFaultsLeaveTheLineOut(t *testing.T) {
	k := New()
	fault := errors.New("fault")
	var seen []string
	k.Before = func(write string) error {
		if strings.Contains(write, "10.96.0.2") {
			return fault
		}
		return nil
	}
	k.After = func(write string) { seen = append(seen, write) }
	err := k.Apply("ipvsadm -R", "-A -t 10.96.0.1:80 -s rr\n-A -t 10.96.0.2:80 -s rr\n-A -t 10.96.0.3:80 -s rr\n")
	if !errors.Is(err, fault) || len(seen) != 1 || len(k.Servers) != 1 {
		t.Errorf("%v, after %q", err, seen)
	}
}

// TestPacketsTakeTheirWay sends packets to a virtual server with a mark, and to another.
func TestPacketsTakeTheirWay(t *testing.T) {
	k := New(netip.MustParseAddr("192.0.2.1"))
	for _, in := range [][2]string{
		{"ipset restore", "create IN hash:ip,port skbinfo\nadd IN 192.0.2.1,tcp:80 skbmark 0x3001\ncreate NET hash:ip,port,net\nadd NET 192.0.2.1,tcp:81,203.0.113.0/24\n"},
		{"nft -f -", "ct state new meta mark & 0x3000 == 0x3000 meta mark set meta mark & 0x3fff\n"},
		{"iptables-restore --noflush", "*mangle\n-A INPUT -s 10.0.0.0/8 -j SET --map-set IN dst,dst --map-mark\n-A INPUT -j MARK --set-xmark 0x10000/0x10000\n" +
			"-A INPUT -m set --match-set NET dst,dst,src -j DROP\n-A POSTROUTING -m ipvs --ipvs -j MARK --set-xmark 0x1/0x1\nCOMMIT\n*nat\n-A POSTROUTING -m mark --mark 0x1/0x1 -j MASQUERADE\nCOMMIT\n"},
		{"ipvsadm -R", "-A -f 12289 -s wrr\n-a -f 12289 -r 10.1.0.1:80 -m -w 3\n-A -t 192.0.2.1:80 -s rr -p 60\n-a -t 192.0.2.1:80 -r 10.1.0.2:80 -m -w 5\n-a -t 192.0.2.1:80 -r 10.1.0.3:80 -m -w 0\n"},
	} {
		if err := k.Apply(in[0], in[1]); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		from, to, want string
		weight         int
		action         ruleset.Action
	}{
		{"10.0.0.9", "192.0.2.1:80", "10.1.0.1:80", 3, ruleset.ActionForward},
		{"198.51.100.9", "192.0.2.1:80", "10.1.0.2:80", 1, ruleset.ActionForward},
		{"203.0.113.9", "192.0.2.1:81", "", 0, ruleset.ActionDrop},
		{"198.51.100.9", "192.0.2.1:81", "", 0, 0},
	} {
		out := k.Handle(ruleset.Packet{From: netip.MustParseAddr(c.from), InInterface: "eth0", To: netip.MustParseAddrPort(c.to), Protocol: v1.ProtocolTCP})
		if out.Action != c.action || len(out.Endpoints) != min(c.weight, 1) {
			t.Errorf("%s to %s: %+v", c.from, c.to, out)
		} else if c.weight != 0 && (out.Endpoints[0].Addr.String() != c.want || out.Endpoints[0].Weight != c.weight || !out.Endpoints[0].Masquerade) {
			t.Errorf("%s to %s: %+v, want %s", c.from, c.to, out, c.want)
		}
	}
}
