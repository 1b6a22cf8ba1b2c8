package fake

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

var errUnknown = errors.New("unknown command")

// Flags of a virtual server (IP_VS_SVC_F_…).
const (
	persistent = 0x0001
	onePacket  = 0x0004
	fallback   = 0x0008
	hashPort   = 0x0010
)

// How a real server is reached (IP_VS_CONN_F_…).
var forwardings = map[string]uint8{"-m": 0, "-i": 2, "-g": 3}

// tunnels holds the types of tunnels by their numbers (IP_VS_CONN_F_TUNNEL_TYPE_…).
var tunnels = []string{"ipip", "gue", "gre"}

// parseServer returns the virtual server that arguments of ipvsadm name.
func parseServer(args []string) (s Server, err error) {
	if f := option(args, "-f"); f != "" {
		mark, err := strconv.ParseUint(f, 10, 32)
		s = Server{Family: tracker.IPv4, Mark: uint32(mark)}
		if slices.Contains(args, "-6") {
			s.Family = tracker.IPv6
		}
		return s, err
	}
	for flag, p := range serverFlags {
		if at := option(args, flag); at != "" {
			s.At, err = netip.ParseAddrPort(at)
			s.Family, s.Protocol = tracker.FamilyOf(s.At.Addr()), inet.Protocol(p)
			return s, err
		}
	}
	return s, errUnknown
}

var serverFlags = map[string]v1.Protocol{"-t": v1.ProtocolTCP, "-u": v1.ProtocolUDP, "--sctp-service": v1.ProtocolSCTP}

// String names a virtual server as ipvsadm does.
func (s Server) String() string {
	switch {
	case s.Mark != 0 && s.Family == tracker.IPv6:
		return fmt.Sprintf("-f %d -6", s.Mark)
	case s.Mark != 0:
		return fmt.Sprintf("-f %d", s.Mark)
	}
	for flag, p := range serverFlags {
		if inet.Protocol(p) == s.Protocol {
			return flag + " " + s.At.String()
		}
	}
	return fmt.Sprint(s.Protocol, " ", s.At)
}

func (k *Kernel) ipvsadm(args []string) ([]string, error) {
	switch args[0] {
	case "-Sn":
		return k.saveServers(), nil
	case "-C":
		clear(k.Servers)
		return nil, nil
	case "--set":
		_, err := fmt.Sscan(strings.Join(args[1:], " "), &k.Timeouts[0], &k.Timeouts[1], &k.Timeouts[2])
		return nil, err
	}
	s, err := parseServer(args)
	if err != nil {
		return nil, err
	}
	v := k.Servers[s]
	switch {
	case v == nil && args[0] != "-A":
		return nil, syscall.ESRCH
	case v != nil && args[0] == "-A":
		return nil, syscall.EEXIST
	case args[0] == "-A":
		v = &Virtual{Reals: map[netip.AddrPort]*Real{}}
		if err := v.set(args); err != nil {
			return nil, err
		}
		k.Servers[s] = v
	case args[0] == "-E":
		return nil, v.set(args)
	case args[0] == "-D":
		delete(k.Servers, s)
	default:
		return nil, v.change(args)
	}
	return nil, nil
}

// set sets the properties that arguments name.
func (v *Virtual) set(args []string) error {
	v.Scheduler, v.Flags, v.Timeout = option(args, "-s"), 0, 0
	if v.Scheduler == "" {
		v.Scheduler = "wlc"
	}
	if t := option(args, "-p"); t != "" {
		n, err := strconv.ParseUint(t, 10, 32)
		if err != nil {
			return err
		}
		v.Flags, v.Timeout = persistent, uint32(n)
	}
	if slices.Contains(args, "-o") {
		v.Flags |= onePacket
	}
	for _, flag := range strings.Split(option(args, "-b"), ",") {
		switch flag {
		case "":
		case v.Scheduler + "-fallback":
			v.Flags |= fallback
		case v.Scheduler + "-port":
			v.Flags |= hashPort
		default:
			return fmt.Errorf("flag %q of scheduler %s: %w", flag, v.Scheduler, errUnknown)
		}
	}
	return nil
}

// change changes a real server.
func (v *Virtual) change(args []string) error {
	at, err := netip.ParseAddrPort(option(args, "-r"))
	if err != nil {
		return err
	}
	have := v.Reals[at]
	r := &Real{Weight: 1, Forwarding: forwardings["-g"]}
	if have != nil {
		r.Active, r.Inactive = have.Active, have.Inactive
	}
	if w := option(args, "-w"); w != "" {
		n, err := strconv.ParseUint(w, 10, 16)
		if err != nil {
			return err
		}
		r.Weight = uint16(n)
	}
	for flag, how := range forwardings {
		if slices.Contains(args, flag) {
			r.Forwarding = how
		}
	}
	if name := option(args, "--tun-type"); name != "" {
		i := slices.Index(tunnels, name)
		if i < 0 {
			return fmt.Errorf("tunnel %q: %w", name, errUnknown)
		}
		r.Tunnel = uint8(i)
	}
	if p := option(args, "--tun-port"); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return err
		}
		r.Port = uint16(n)
	}
	switch args[0] {
	case "-a":
		if have != nil {
			return syscall.EEXIST
		}
		v.Reals[at] = r
	case "-e", "-d":
		if have == nil {
			return syscall.ENOENT
		}
		if *have = *r; args[0] == "-d" {
			delete(v.Reals, at)
		}
	default:
		return errUnknown
	}
	return nil
}

func (k *Kernel) saveServers() (out []string) {
	for s, v := range k.Servers {
		line := fmt.Sprintf("-A %s -s %s", s, v.Scheduler)
		if v.Flags&persistent != 0 {
			line += fmt.Sprintf(" -p %d", v.Timeout)
		}
		var list []string
		for _, f := range []struct {
			bit  uint32
			name string
		}{{fallback, "-fallback"}, {hashPort, "-port"}} {
			if v.Flags&f.bit != 0 {
				list = append(list, v.Scheduler+f.name)
			}
		}
		if len(list) != 0 {
			line += " -b " + strings.Join(list, ",")
		}
		if v.Flags&onePacket != 0 {
			line += " -o"
		}
		out = append(out, line)
		for at, r := range v.Reals {
			out = append(out, fmt.Sprintf("-a %s -r %s %s", s, at, r))
		}
	}
	slices.Sort(out)
	return out
}

// String returns the properties as ipvsadm writes them.
func (r *Real) String() string {
	switch {
	case r.Forwarding == forwardings["-m"]:
		return fmt.Sprintf("-m -w %d", r.Weight)
	case r.Forwarding == forwardings["-g"]:
		return fmt.Sprintf("-g -w %d", r.Weight)
	case r.Port != 0:
		return fmt.Sprintf("-i -w %d --tun-type %s --tun-port %d --tun-nocsum", r.Weight, tunnels[r.Tunnel], r.Port)
	case r.Tunnel != 0:
		return fmt.Sprintf("-i -w %d --tun-type %s --tun-nocsum", r.Weight, tunnels[r.Tunnel])
	}
	return fmt.Sprintf("-i -w %d --tun-type ipip", r.Weight)
}
