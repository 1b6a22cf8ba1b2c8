package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"

	v1 "k8s.io/api/core/v1"
)

// memoryNode is a namespace in memory as a node. It understands the commands of other programs
// that the tests use.
type memoryNode struct{ *memory }

func (n memoryNode) open(_ testing.TB, c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	n.missing["zz"] = true
	b := newBackend(c, n.handle(c))
	return b, b.probe()
}

func (n memoryNode) lines(tb testing.TB, command string) []string {
	tb.Helper()
	args := strings.Fields(command)
	out, err := n.command(args[0], args[1:])
	if err != nil {
		tb.Fatalf("%s: %v", command, err)
	}
	return out
}

func (n memoryNode) limit(_ testing.TB, set string, most int) { n.sets[set].most = most }

func (n memoryNode) command(program string, args []string) ([]string, error) {
	switch program {
	case "iptables-save", "ip6tables-save":
		table := ""
		if len(args) == 2 {
			table = args[1]
		}
		var out strings.Builder
		err := n.tables[familyOfProgram(program)].Save(context.Background(), table, &out)
		return strings.Split(strings.TrimSpace(out.String()), "\n"), err
	case "iptables", "ip6tables":
		return nil, n.tables[familyOfProgram(program)].Run(args...)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch program {
	case "ipvsadm":
		return n.ipvsadm(args)
	case "ipset":
		return n.ipset(args)
	case "ip":
		return n.ip(args)
	case "nft": // "list tables", or a command that deletes the table
		if args[0] != "list" {
			n.restored = Marks{}
		}
		if n.restored == (Marks{}) {
			return nil, nil
		}
		return []string{"table inet proxier-ipvs-marks"}, nil
	}
	return nil, fmt.Errorf("unknown program")
}

func familyOfProgram(name string) tracker.Family {
	if strings.HasPrefix(name, "ip6") {
		return tracker.IPv6
	}
	return tracker.IPv4
}

// option returns the argument after name, or "".
func option(args []string, name string) string {
	if i := slices.Index(args, name); i >= 0 && i+1 < len(args) {
		return args[i+1]
	}
	return ""
}

// server returns the virtual server that arguments of ipvsadm name.
func server(args []string) (k virtualKey, err error) {
	if f := option(args, "-f"); f != "" {
		mark, err := strconv.ParseUint(f, 10, 32)
		return virtualKey{family: tracker.IPv4, mark: uint32(mark)}, err
	}
	for flag, p := range serverFlags {
		if at := option(args, flag); at != "" {
			k.at, err = netip.ParseAddrPort(at)
			k.family, k.proto = tracker.FamilyOf(k.at.Addr()), inet.Protocol(p)
		}
	}
	return k, err
}

var serverFlags = map[string]v1.Protocol{"-t": v1.ProtocolTCP, "-u": v1.ProtocolUDP, "--sctp-service": v1.ProtocolSCTP}

func (n memoryNode) ipvsadm(args []string) (out []string, err error) {
	switch args[0] {
	case "-Sn":
		return n.saveServers(), nil
	case "-C":
		clear(n.virtuals)
		return nil, nil
	}
	k, err := server(args)
	if err != nil {
		return nil, err
	}
	if args[0] == "-A" {
		n.virtuals[k] = &memoryVirtual{virtual: virtual{scheduler: Scheduler(option(args, "-s"))}, reals: map[netip.AddrPort]*real{}}
		return nil, nil
	}
	v, err := n.find(k)
	if err != nil {
		return nil, err
	}
	at, _ := netip.ParseAddrPort(option(args, "-r"))
	switch args[0] {
	case "-E":
		v.scheduler = Scheduler(option(args, "-s"))
	case "-D":
		delete(n.virtuals, k)
	case "-a", "-e":
		weight := uint64(1)
		if w := option(args, "-w"); w != "" {
			weight, err = strconv.ParseUint(w, 10, 16)
		}
		v.reals[at] = &real{at: at, weight: uint16(weight)}
	case "-d":
		delete(v.reals, at)
	default:
		err = fmt.Errorf("unknown command")
	}
	return nil, err
}

func (n memoryNode) saveServers() (out []string) {
	for k, v := range n.virtuals {
		name := fmt.Sprintf("-f %d", k.mark)
		if k.mark == 0 {
			for flag, p := range serverFlags {
				if inet.Protocol(p) == k.proto {
					name = flag + " " + k.at.String()
				}
			}
		}
		out = append(out, fmt.Sprintf("-A %s -s %s", name, v.scheduler)+v.flagText())
		for at, r := range v.reals {
			out = append(out, fmt.Sprintf(map[Forwarding]string{0: "-a %s -r %s -m -w %d", ForwardingTunnel: "-a %s -r %s -i -w %d --tun-type ipip", ForwardingDirect: "-a %s -r %s -g -w %d"}[r.forwarding], name, at, r.weight))
		}
	}
	slices.Sort(out)
	return out
}

// flagText returns the flags of the scheduler as ipvsadm prints them.
func (v *memoryVirtual) flagText() string {
	var list []string
	for bit, name := range map[uint32]string{flagFallback: "-fallback", flagPort: "-port"} {
		if v.flags&bit != 0 {
			list = append(list, string(v.scheduler)+name)
		}
	}
	if slices.Sort(list); len(list) == 0 {
		return ""
	}
	return " -b " + strings.Join(list, ",")
}

// element returns the element of a set that ipset's argument names.
func element(typeName, text string) (e entry, err error) {
	fields := strings.Split(text, ",")
	if typeName == "bitmap:port" {
		port, err := strconv.ParseUint(text, 10, 16)
		e.port = uint16(port)
		return e, err
	}
	if e.addr, err = netip.ParseAddr(fields[0]); err != nil || len(fields) == 1 {
		return e, err
	}
	proto, number, _ := strings.Cut(fields[1], ":")
	port, err := strconv.ParseUint(number, 10, 16)
	e.proto, e.port = inet.Protocol(v1.Protocol(strings.ToUpper(proto))), uint16(port)
	if err == nil && len(fields) > 2 {
		var a netip.Addr
		a, err = netip.ParseAddr(fields[2])
		e.other = netip.PrefixFrom(a, a.BitLen())
	}
	return e, err
}

func (n memoryNode) ipset(args []string) (out []string, err error) {
	switch args[0] {
	case "save":
		for _, name := range slices.Sorted(maps.Keys(n.sets)) {
			if len(args) > 1 && args[1] != name {
				continue
			}
			out = append(out, "create "+name+" "+n.sets[name].typeName)
			for e, mark := range n.sets[name].elements {
				line := fmt.Sprintf("add %s %s,%s:%d", name, e.addr, strings.ToLower(string(inet.ProtocolOf(e.proto))), e.port)
				if mark != 0 {
					line += fmt.Sprintf(" skbmark %#x", mark)
				}
				out = append(out, line)
			}
		}
		return out, nil
	case "flush":
		for _, s := range n.sets {
			clear(s.elements)
		}
		return nil, nil
	case "create":
		most, err := strconv.Atoi(option(args, "maxelem"))
		n.sets[args[1]] = &memorySet{args[2], most, map[entry]uint32{}}
		return nil, err
	case "swap":
		n.sets[args[1]], n.sets[args[2]] = n.sets[args[2]], n.sets[args[1]]
		return nil, nil
	}
	s := n.sets[args[1]]
	if s == nil {
		return nil, fmt.Errorf("no set %s", args[1])
	}
	e, err := element(s.typeName, args[2])
	if args[0] == "add" {
		s.elements[e] = 0
	} else {
		delete(s.elements, e)
	}
	return nil, err
}

func (n memoryNode) ip(args []string) (out []string, err error) {
	device := option(args, "dev")
	switch command := strings.Join(args[:min(len(args), 2)], " "); command {
	case "-o addr":
		for a := range n.devices[device].addrs {
			out = append(out, fmt.Sprintf("1: %s inet %s/%d", device, a, a.BitLen()))
		}
	case "addr add", "addr del":
		p, err := netip.ParsePrefix(args[2])
		if err != nil {
			return nil, err
		}
		n.devices[device].addrs[p.Addr()] = true
		if command == "addr del" {
			delete(n.devices[device].addrs, p.Addr())
		}
		if n.devices[device].kind != "dummy" {
			n.events++
		}
	case "link del":
		delete(n.devices, args[2])
	case "link add":
		n.addDevice(args[2], option(args, "type"))
	default:
		err = fmt.Errorf("unknown command")
	}
	return out, err
}
