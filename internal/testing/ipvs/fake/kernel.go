// Package fake is a kernel with IPVS in memory, for tests on every system. It applies the inputs of
// transactions, lists as the tools list, and sends packets through rules, sets and virtual servers:
//
//	kernel := fake.New(netip.MustParseAddr("192.0.2.1")) // the node's address
//	for _, in := range tx.Inputs() {                     // of an ipvs.Transaction
//		err := kernel.Apply(in.Program, in.Text)
//	}
//	got := kernel.Handle(packet) // what happens to a ruleset.Packet
//
// It is a simulator, not a mock: like the kernel, it refuses what exists, what is missing, and elements for
// which a set has no room. It knows the syntax that package ipvs uses. Its iptables rules are those of
// package [github.com/go-proxier/proxier/internal/iptmemory].
package fake

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/go-proxier/proxier/internal/iptmemory"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Kernel is a network namespace. [New] makes one. Its methods may be called concurrently, and its
// fields may be used in [Kernel.Do].
type Kernel struct {
	// Before, unless it is nil, is called with each write of [Kernel.Apply]: a line of ipvsadm, ipset and
	// ip, and an input of the other programs. An error is the result of the write, which has no effect.
	Before func(write string) error
	// After, unless it is nil, is called after each write of Apply.
	After func(write string)

	// Servers holds the virtual servers, Sets the ipsets by name, and Devices the network devices by name.
	Servers map[Server]*Virtual
	Sets    map[string]*Set
	Devices map[string]*Device
	// Tables holds the tables of iptables.
	Tables map[tracker.Family]*iptmemory.Tables
	// Marks is what the table of nf_tables does right before IPVS.
	Marks Marks
	// Timeouts holds the seconds that "ipvsadm --set" set.
	Timeouts [3]int

	mu    sync.Mutex
	added int
}

// Server identifies a virtual server by address, port and protocol, or by a packet mark.
type Server struct {
	// Family is the address family.
	Family tracker.Family
	// Protocol is the IP protocol's number, 0 with a mark.
	Protocol uint8
	// At is the address and port, the zero value with a mark.
	At netip.AddrPort
	// Mark is the packet mark, or 0.
	Mark uint32
}

// Virtual is a virtual server.
type Virtual struct {
	// Scheduler is the name of the scheduler.
	Scheduler string
	// Flags are the kernel's (IP_VS_SVC_F_… of include/uapi/linux/ip_vs.h).
	Flags uint32
	// Timeout is the timeout of persistence, in seconds.
	Timeout uint32
	// Reals holds the real servers.
	Reals map[netip.AddrPort]*Real
	// Counters holds what the kernel counted. No packet changes it.
	Counters dataplane.Counters
}

// Real is a real server.
type Real struct {
	// Weight is 0 if the real server gets no new connections.
	Weight uint16
	// Forwarding is the kernel's number (IP_VS_CONN_F_FWD_MASK), and Tunnel that of a tunnel's type
	// (IP_VS_CONN_F_TUNNEL_TYPE_…), with Port for GUE.
	Forwarding, Tunnel uint8
	Port               uint16
	// Active and Inactive are its numbers of connections.
	Active, Inactive int
}

// Set is an ipset.
type Set struct {
	// Type is the name of its type, as "hash:ip,port".
	Type string
	// Family is the family of the addresses.
	Family tracker.Family
	// Max is the largest number of elements of a hash.
	Max int
	// Skbinfo is set if elements have packet marks.
	Skbinfo bool
	// Elements holds the packet marks of the elements.
	Elements map[Element]uint32
}

// Element is an element of a set. It has the fields that the set's type has.
type Element struct {
	// Addr is the first address.
	Addr netip.Addr
	// Protocol is the IP protocol's number.
	Protocol uint8
	// Port is the port.
	Port uint16
	// Other is the second address or the prefix.
	Other netip.Prefix
}

// Device is a network device.
type Device struct {
	// Kind is the type, as "dummy".
	Kind string
	// Index is different for each device that ever was.
	Index int
	// Addrs holds the addresses.
	Addrs map[netip.Addr]bool
}

// Marks says which bits of packets' marks stay: if a new connection's mark has all bits of Value, those
// of Keep. The zero value means that there is no such rule.
type Marks struct {
	// Value has the bits by which marks are recognized.
	Value uint32
	// Keep has the bits that stay.
	Keep uint32
}

// New returns a namespace with a device eth0 that has the addresses.
func New(addrs ...netip.Addr) *Kernel {
	k := &Kernel{
		Servers: map[Server]*Virtual{}, Sets: map[string]*Set{}, Devices: map[string]*Device{},
		Tables: map[tracker.Family]*iptmemory.Tables{tracker.IPv4: iptmemory.New(), tracker.IPv6: iptmemory.New()},
	}
	eth0 := k.AddDevice("eth0", "veth")
	for _, a := range addrs {
		eth0.Addrs[a] = true
	}
	return k
}

// AddDevice adds a device, or replaces it. It must be called in [Kernel.Do], or before other methods.
func (k *Kernel) AddDevice(name, kind string) *Device {
	k.added++
	k.Devices[name] = &Device{kind, k.added, map[netip.Addr]bool{}}
	return k.Devices[name]
}

// Do calls f while no other method uses the namespace.
func (k *Kernel) Do(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// Apply applies the input of a program, such as "ipset restore". The first line that the kernel refuses ends
// the programs of lines. The error is Before's, or wraps the kernel's, such as [syscall.EEXIST].
func (k *Kernel) Apply(program, text string) error {
	name := strings.Fields(program)[0]
	writes := []string{text}
	if name == "ipvsadm" || name == "ipset" || name == "ip" {
		writes = slices.Collect(strings.Lines(text))
	}
	for _, w := range writes {
		w = strings.TrimSuffix(w, "\n")
		if k.Before != nil {
			if err := k.Before(w); err != nil {
				return err
			}
		}
		var err error
		k.Do(func() { err = k.write(name, w) })
		if err != nil {
			return fmt.Errorf("%s: %s: %w", name, w, err)
		}
		if k.After != nil {
			k.After(w)
		}
	}
	return nil
}

func (k *Kernel) write(program, text string) (err error) {
	switch program {
	case "iptables-restore", "ip6tables-restore":
		return k.Tables[familyOf(program)].Restore(context.Background(), []byte(text+"\n"))
	case "nft":
		k.Marks, err = parseMarks(text)
		return err
	}
	_, err = k.run(program, strings.Fields(text))
	return err
}

// parseMarks returns what the rules of a table do.
func parseMarks(text string) (m Marks, err error) {
	for line := range strings.Lines(text) {
		if _, rule, ok := strings.Cut(line, "ct state new "); ok {
			if _, err = fmt.Sscanf(rule, "meta mark & %v == %v meta mark set meta mark & %v", &m.Value, &m.Value, &m.Keep); err != nil {
				return Marks{}, fmt.Errorf("%q: %w", line, err)
			}
		}
	}
	return m, nil
}

// Run runs a command of ipvsadm, ipset, ip, iptables, iptables-save, nft or their variants for IPv6, and returns
// its output. It does not call Before and After. The error is the kernel's, such as [syscall.ENOENT], or that of an
// unknown command.
func (k *Kernel) Run(program string, args ...string) (string, error) {
	var lines []string
	var err error
	k.Do(func() { lines, err = k.run(program, args) })
	if len(lines) == 0 {
		return "", err
	}
	return strings.Join(lines, "\n") + "\n", err
}

func (k *Kernel) run(program string, args []string) ([]string, error) {
	if len(args) == 0 && !strings.HasSuffix(program, "-save") {
		return nil, fmt.Errorf("%s: %w", program, errUnknown)
	}
	switch program {
	case "iptables-save", "ip6tables-save":
		table := ""
		if len(args) == 2 {
			table = args[1]
		}
		var out strings.Builder
		err := k.Tables[familyOf(program)].Save(context.Background(), table, &out)
		return strings.Split(strings.TrimSpace(out.String()), "\n"), err
	case "iptables", "ip6tables":
		return nil, k.Tables[familyOf(program)].Run(args...)
	case "ipvsadm":
		return k.ipvsadm(args)
	case "ipset":
		return k.ipset(args)
	case "ip":
		return k.ip(args)
	case "nft": // "list tables", or a command that deletes the table
		if args[0] != "list" {
			k.Marks = Marks{}
		}
		if k.Marks == (Marks{}) {
			return nil, nil
		}
		return []string{"table inet proxier-ipvs-marks"}, nil
	}
	return nil, fmt.Errorf("%s: %w", program, errUnknown)
}

func familyOf(program string) tracker.Family {
	if strings.HasPrefix(program, "ip6") {
		return tracker.IPv6
	}
	return tracker.IPv4
}

func (k *Kernel) ip(args []string) (out []string, err error) {
	name := option(args, "dev")
	d := k.Devices[name]
	command := strings.Join(args[:min(len(args), 2)], " ")
	if d == nil && !strings.HasPrefix(command, "link ") {
		return nil, syscall.ENODEV
	}
	switch command {
	case "-o addr":
		for a := range d.Addrs {
			inet := "inet"
			if a.Is6() {
				inet = "inet6"
			}
			out = append(out, fmt.Sprintf("1: %s %s %s/%d", name, inet, a, a.BitLen()))
		}
		slices.Sort(out)
	case "addr add", "addr del":
		p, err := netip.ParsePrefix(args[2])
		switch add := command == "addr add"; {
		case err != nil:
			return nil, err
		case add && d.Addrs[p.Addr()]:
			return nil, syscall.EEXIST
		case add:
			d.Addrs[p.Addr()] = true
		case !d.Addrs[p.Addr()]:
			return nil, syscall.EADDRNOTAVAIL
		default:
			delete(d.Addrs, p.Addr())
		}
	case "link del":
		if k.Devices[args[2]] == nil {
			return nil, syscall.ENODEV
		}
		delete(k.Devices, args[2])
	case "link add":
		if k.Devices[args[2]] != nil {
			return nil, syscall.EEXIST
		}
		k.AddDevice(args[2], option(args, "type"))
	default:
		return nil, errUnknown
	}
	return out, nil
}

// local returns all addresses of the namespace.
func (k *Kernel) local() []netip.Addr {
	n := 0
	for _, d := range k.Devices {
		n += len(d.Addrs)
	}
	out := make([]netip.Addr, 0, n) // for each packet: by far most of its time, if it grows
	for _, d := range k.Devices {
		for a := range d.Addrs {
			out = append(out, a)
		}
	}
	return out
}

// option returns the argument after name, or "".
func option(args []string, name string) string {
	if i := slices.Index(args, name); i >= 0 && i+1 < len(args) {
		return args[i+1]
	}
	return ""
}
