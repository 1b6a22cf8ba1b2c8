package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// memoryNode is a namespace in memory as a node.
type memoryNode struct{ *memory }

func (n memoryNode) open(_ testing.TB, c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	n.missing["zz"] = true
	b := newBackend(c, n.handle())
	return b, b.probe()
}

func (n memoryNode) limit(_ testing.TB, set string, most int) { n.sets[set].max = most }

// lines does what a program does, in the forms that tests use.
func (n memoryNode) lines(tb testing.TB, command string) (out []string) {
	tb.Helper()
	program, rest, _ := strings.Cut(command, " ")
	args := strings.Fields(rest)
	var err error
	n.do(func() {
		switch program {
		case "ipvsadm":
			out = n.ipvsadm(args)
		case "ipset":
			out = n.ipset(args)
		case "ip":
			out = n.ip(args)
		case "nft":
			if n.marks = n.marks && args[0] != "delete"; n.marks {
				out = []string{"table inet " + marksTable}
			}
		case "iptables":
			err = n.tables[tracker.IPv4].Run(args...)
		case "iptables-save", "ip6tables-save":
			f, table := tracker.IPv4, ""
			if program[2] == '6' {
				f = tracker.IPv6
			}
			if len(args) == 2 {
				table = args[1]
			}
			var text strings.Builder
			err = n.tables[f].Save(context.Background(), table, &text)
			out = strings.Split(strings.TrimSpace(text.String()), "\n")
		default:
			tb.Fatalf("unknown program in %q", command)
		}
	})
	if err != nil {
		tb.Fatalf("%s: %v", command, err)
	}
	return out
}

func (m *memory) ipvsadm(args []string) (out []string) {
	switch args[0] {
	case "-C":
		clear(m.servers)
		return nil
	case "-Sn":
		for k, v := range m.servers {
			out = append(out, "-A "+k.text()+" "+v.text())
			for at, r := range v.reals {
				text := r.text()
				if r.forwarding == ForwardingTunnel {
					text += " --tun-type ipip"
				} else if r.forwarding.tunnel() != 0 {
					text += " --tun-nocsum"
				}
				out = append(out, fmt.Sprintf("-a %s -r %s %s", k.text(), at, text))
			}
		}
		slices.Sort(out)
		return out
	}
	k := virtualKey{family: tracker.IPv4}
	if args[1] == "-f" {
		_, _ = fmt.Sscan(args[2], &k.mark)
	} else {
		k = tcpServer(args[2])
	}
	if args[0] == "-D" {
		delete(m.servers, k)
		return nil
	}
	if args[0] == "-A" {
		m.servers[k] = &memoryServer{reals: map[netip.AddrPort]*real{}}
	}
	v := m.servers[k]
	if args[3] == "-s" {
		v.virtual = virtual{scheduler: Scheduler(args[4])}
		return nil
	}
	at := netip.MustParseAddrPort(args[4])
	delete(v.reals, at)
	if args[0] != "-d" {
		v.reals[at] = &real{at: at, weight: 1}
		if len(args) > 6 { // -m -w WEIGHT
			_, _ = fmt.Sscan(args[7], &v.reals[at].weight)
		}
	}
	return nil
}

func (m *memory) ipset(args []string) (out []string) {
	switch args[0] {
	case "flush":
		for _, s := range m.sets {
			clear(s.elements)
		}
		return nil
	case "save":
		for _, name := range slices.Sorted(maps.Keys(m.sets)) {
			if len(args) == 1 || args[1] == name {
				out = append(out, m.sets[name].save(name)...)
			}
		}
		return out
	case "create": // NAME TYPE maxelem N
		s := &memorySet{elements: map[entry]uint32{}}
		for typeName, _ := s.kind.typeName(); typeName != args[2]; typeName, _ = s.kind.typeName() {
			s.kind++
		}
		_, _ = fmt.Sscan(args[4], &s.max)
		m.sets[args[1]] = s
		return nil
	case "swap":
		m.sets[args[1]], m.sets[args[2]] = m.sets[args[2]], m.sets[args[1]]
		return nil
	}
	s := m.sets[args[1]]
	e := s.key(entry{family: tracker.IPv4})
	for i, field := range strings.Split(args[2], ",") {
		switch i {
		case 0:
			e.addr = netip.MustParseAddr(field)
		case 1:
			e.proto = inet.TCP
			_, _ = fmt.Sscanf(field, "tcp:%d", &e.port)
		case 2:
			e.other = netip.MustParsePrefix(field + "/32")
		}
	}
	if delete(s.elements, e); args[0] == "add" {
		s.elements[e] = 0
	}
	return nil
}

func (s *memorySet) save(name string) (out []string) {
	for e, mark := range s.elements {
		line := "add " + name + " " + e.text()
		if mark != 0 {
			line += fmt.Sprintf(" skbmark %#x", mark)
		}
		out = append(out, line)
	}
	slices.Sort(out)
	typeName, _ := s.kind.typeName()
	return append([]string{"create " + name + " " + typeName}, out...)
}

func (m *memory) ip(args []string) (out []string) {
	switch strings.Join(args[:2], " ") {
	case "link del":
		delete(m.devices, args[2])
	case "link add": // NAME type KIND
		m.addDevice(args[2], args[4])
	case "-o addr": // show dev NAME
		for a := range m.devices[args[4]].addrs {
			inet := "inet"
			if a.Is6() {
				inet = "inet6"
			}
			out = append(out, fmt.Sprintf("1: %s %s %s/%d", args[4], inet, a, a.BitLen()))
		}
		slices.Sort(out)
	default: // addr add or del PREFIX dev NAME
		d, a := m.devices[args[4]], netip.MustParsePrefix(args[2]).Addr()
		if delete(d.addrs, a); args[1] == "add" {
			d.addrs[a] = true
		}
		if args[4] != deviceName {
			m.events++
		}
	}
	return out
}
