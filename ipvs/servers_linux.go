package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"

	moby "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// servers makes requests to IPVS through github.com/moby/ipvs. Without a handle it has no
// virtual servers.
type servers struct {
	handle *moby.Handle
}

// errNoFamily is the error of openIPVS if this process cannot use the kernel's IPVS.
var errNoFamily = errors.New("the kernel has no generic netlink family IPVS: its module ip_vs is missing or not loaded")

// openIPVS opens a handle in the calling thread's namespace. The kernel loads the module
// ip_vs if it can.
func openIPVS() (*moby.Handle, error) {
	// This request makes the kernel load the module. moby looks the family up once in a process, even if it is
	// missing, and then treats every request as successful, because no request gets an answer.
	nl, err := netlink.NewHandle(unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("open generic netlink socket: %w", err)
	}
	_, err = nl.GenlFamilyGet("IPVS")
	nl.Close()
	if errors.Is(err, unix.ENOENT) {
		return nil, errNoFamily
	}
	if err != nil {
		return nil, fmt.Errorf("look up generic netlink family IPVS: %w", err)
	}
	h, err := moby.New("")
	if err != nil {
		return nil, fmt.Errorf("open IPVS socket: %w", err)
	}
	if err := checkIPVS(h); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// checkIPVS requests a virtual server that cannot exist. It returns an error unless the
// kernel answers that it does not.
func checkIPVS(h *moby.Handle) error {
	var errno unix.Errno
	_, err := h.GetService(&moby.Service{AddressFamily: unix.AF_INET, Protocol: 255, Address: net.IPv4zero})
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil
	case err == nil || !errors.As(err, &errno):
		return errors.New("IPVS became available after this process first looked for it; restart the process")
	}
	return err
}

func (key virtualKey) service(v virtual) *moby.Service {
	s := &moby.Service{
		AddressFamily: uint16(inet.AF(key.family)),
		FWMark:        key.mark,
		SchedName:     string(v.scheduler),
		Flags:         v.flags,
		Timeout:       v.timeout,
		// Persistence treats clients with the same bits in this mask as one. For IPv6 it is
		// the mask's length.
		Netmask: 0xffffffff,
	}
	if key.family == tracker.IPv6 {
		s.Netmask = 128
	}
	if key.mark == 0 {
		s.Address, s.Port, s.Protocol = key.at.Addr().AsSlice(), key.at.Port(), uint16(key.proto)
	}
	return s
}

// virtuals calls fn with each virtual server of the family. It reads the list until two results in a row are equal:
// the kernel splits a long list into messages, and finds its place in the next one by counting the virtual servers of
// all network namespaces (ip_vs_genl_dump_services of net/netfilter/ipvs/ip_vs_ctl.c). If one is added or deleted in
// between, the list lacks some or repeats them, without an error.
func (k *servers) virtuals(f tracker.Family, fn func(virtualKey, virtual)) error {
	found, err := sameTwice(func() (map[virtualKey]virtual, error) {
		found := map[virtualKey]virtual{}
		if k.handle == nil {
			return found, nil
		}
		list, err := k.handle.GetServices()
		if err != nil {
			return nil, fmt.Errorf("list virtual servers: %w", err)
		}
		for _, s := range list {
			if key, ok := keyOf(s); ok && key.family == f {
				found[key] = virtual{Scheduler(s.SchedName), s.Flags &^ flagHashed, s.Timeout}
			}
		}
		return found, nil
	})
	for key, v := range found {
		fn(key, v)
	}
	return err
}

// sameTwice calls list until two results in a row are equal, and returns that result, or the union of all if no two
// are.
func sameTwice[K, V comparable](list func() (map[K]V, error)) (map[K]V, error) {
	const most = 20
	all, last := map[K]V{}, map[K]V(nil)
	for range most {
		found, err := list()
		if err != nil {
			return nil, err
		}
		if last != nil && maps.Equal(last, found) {
			return found, nil
		}
		maps.Copy(all, found)
		last = found
	}
	return all, nil
}

func keyOf(s *moby.Service) (virtualKey, bool) {
	key := virtualKey{mark: s.FWMark}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if s.AddressFamily == uint16(inet.AF(f)) {
			key.family = f
		}
	}
	if s.FWMark == 0 {
		a, ok := netip.AddrFromSlice(s.Address)
		if !ok {
			return virtualKey{}, false
		}
		key.proto, key.at = uint8(s.Protocol), netip.AddrPortFrom(a, s.Port)
	}
	return key, true
}

func (k *servers) reals(key virtualKey, fn func(real)) error {
	list, err := k.handle.GetDestinations(key.service(virtual{}))
	if err != nil {
		return wrap(err, "list real servers of", key)
	}
	for _, d := range list {
		if a, ok := netip.AddrFromSlice(d.Address); ok {
			how := Forwarding(d.ConnectionFlags & moby.ConnectionFlagFwdMask)
			if how == moby.ConnectionFlagLocalNode {
				how = ForwardingTranslated
			}
			fn(real{netip.AddrPortFrom(a, d.Port), uint16(d.Weight), how, d.ActiveConnections, d.InactiveConnections})
		}
	}
	return nil
}

func (k *servers) addVirtual(key virtualKey, v virtual) error {
	err := k.handle.NewService(key.service(v))
	switch {
	case errors.Is(err, unix.EEXIST):
		return k.setVirtual(key, v)
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("add virtual server %s: the kernel has no scheduler %s (module ip_vs_%s): %w", key, v.scheduler, v.scheduler, err)
	}
	return wrap(err, "add virtual server", key)
}

func (k *servers) setVirtual(key virtualKey, v virtual) error {
	err := k.handle.UpdateService(key.service(v))
	return wrap(err, "set virtual server", key)
}

func (k *servers) delVirtual(key virtualKey) error {
	err := k.handle.DelService(key.service(virtual{}))
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return wrap(err, "delete virtual server", key)
}

func (r real) destination() *moby.Destination {
	if r.forwarding == forwardingMixed {
		r.forwarding = ForwardingTranslated // it gets no new connections
	}
	return &moby.Destination{Address: r.at.Addr().AsSlice(), Port: r.at.Port(), Weight: int(r.weight), ConnectionFlags: uint32(r.forwarding)}
}

func (k *servers) addReal(key virtualKey, r real) error {
	err := k.handle.NewDestination(key.service(virtual{}), r.destination())
	if errors.Is(err, unix.EEXIST) {
		return k.setReal(key, r)
	}
	return wrap(err, "add real server "+r.at.String()+" to", key)
}

func (k *servers) setReal(key virtualKey, r real) error {
	err := k.handle.UpdateDestination(key.service(virtual{}), r.destination())
	return wrap(err, "set real server "+r.at.String()+" of", key)
}

func (k *servers) delReal(key virtualKey, at netip.AddrPort) error {
	err := k.handle.DelDestination(key.service(virtual{}), real{at: at}.destination())
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return wrap(err, "delete real server "+at.String()+" of", key)
}

func (k *servers) setTimeouts(t Timeouts) error {
	if t == (Timeouts{}) {
		return nil
	}
	err := k.handle.SetConfig(&moby.Config{TimeoutTCP: t.TCP, TimeoutTCPFin: t.TCPFin, TimeoutUDP: t.UDP})
	if err != nil {
		return fmt.Errorf("set timeouts: %w", err)
	}
	return nil
}

// statistics returns the counters of each virtual server. It reads two lists and takes the larger counters, because a
// list may lack some (see virtuals).
func (s *system) statistics(f tracker.Family) (map[virtualKey]dataplane.Counters, error) {
	out := map[virtualKey]dataplane.Counters{}
	for range 2 {
		list, err := s.dumpServices()
		if err != nil {
			return nil, fmt.Errorf("list virtual servers: %w", err)
		}
		for _, message := range list {
			key, c, ok := statisticsOf(message)
			if ok && key.family == f && c.Packets >= out[key].Packets {
				out[key] = c
			}
		}
	}
	return out, nil
}

// dumpServices returns the kernel's messages about all virtual servers. Package moby reads their
// counters in 32 bits.
func (s *system) dumpServices() (out [][]byte, err error) {
	if s.handle == nil {
		return nil, nil
	}
	return s.request(getService, unix.NLM_F_DUMP)
}

func (s *system) request(command uint8, flags int, attrs ...*nl.RtAttr) (out [][]byte, err error) {
	err = s.ns.Do(func() error {
		family, err := netlink.GenlFamilyGet("IPVS")
		if err != nil {
			return err
		}
		r := nl.NewNetlinkRequest(int(family.ID), flags)
		r.AddData(&nl.Genlmsg{Command: command, Version: 1})
		for _, a := range attrs {
			r.AddData(a)
		}
		out, err = r.Execute(unix.NETLINK_GENERIC, 0)
		return err
	})
	return out, err
}

// Package moby has no attribute for the type of a tunnel. The methods in this file write and read it.

// serverTunnel is IPVS_DEST_ATTR_TUN_TYPE.
const serverTunnel = 13

func (s *system) addReal(key virtualKey, r real) error {
	if r.forwarding.tunnel() == 0 {
		return s.servers.addReal(key, r)
	}
	_, err := s.request(newServer, unix.NLM_F_ACK, key.attribute(), r.attribute())
	if errors.Is(err, unix.EEXIST) {
		return s.setReal(key, r)
	}
	return wrap(err, "add real server "+r.at.String()+" to", key)
}

func (s *system) setReal(key virtualKey, r real) error {
	if r.forwarding.tunnel() == 0 {
		return s.servers.setReal(key, r)
	}
	_, err := s.request(setServer, unix.NLM_F_ACK, key.attribute(), r.attribute())
	return wrap(err, "set real server "+r.at.String()+" of", key)
}

func (s *system) reals(key virtualKey, fn func(real)) error {
	var types map[netip.AddrPort]Forwarding
	var failed error
	err := s.servers.reals(key, func(r real) {
		if r.forwarding == ForwardingTunnel && types == nil && failed == nil {
			types, failed = s.tunnels(key)
		}
		r.forwarding |= types[r.at] << tunnelShift
		fn(r)
	})
	return errors.Join(err, failed)
}

func (s *system) tunnels(key virtualKey) (map[netip.AddrPort]Forwarding, error) {
	messages, err := s.request(getServer, unix.NLM_F_DUMP, key.attribute())
	out := map[netip.AddrPort]Forwarding{}
	for _, m := range messages {
		for _, server := range nfnl.Attributes(m[min(nl.SizeofGenlmsg, len(m)):]) {
			var v [serverTunnel + 1][]byte
			for typ, data := range nfnl.Attributes(server) {
				if int(typ) < len(v) {
					v[typ] = data
				}
			}
			if len(v[1]) != 16 || len(v[serverTunnel]) != 1 {
				continue
			}
			addr := netip.AddrFrom16([16]byte(v[1]))
			if key.family == tracker.IPv4 {
				addr = netip.AddrFrom4([4]byte(v[1]))
			}
			out[netip.AddrPortFrom(addr, nfnl.Uint16(v[2]))] = Forwarding(v[serverTunnel][0])
		}
	}
	return out, wrap(err, "list tunnels of", key)
}

func (key virtualKey) attribute() *nl.RtAttr {
	family := nl.Uint16Attr(uint16(inet.AF(key.family)))
	if key.mark != 0 {
		return nest(attrService, family, nil, nil, nil, nl.Uint32Attr(key.mark))
	}
	return nest(attrService, family, nl.Uint16Attr(uint16(key.proto)), key.at.Addr().AsSlice(), bigEndian(key.at.Port()))
}

func (r real) attribute() *nl.RtAttr {
	var port, flags []byte
	if r.forwarding == ForwardingGUE {
		port = bigEndian(portGUE)
		if r.at.Addr().Is6() {
			flags = nl.Uint16Attr(1) // a checksum (IP_VS_TUNNEL_ENCAP_FLAG_CSUM), as UDP over IPv6 needs
		}
	}
	return nest(attrServer, r.at.Addr().AsSlice(), bigEndian(r.at.Port()), nl.Uint32Attr(uint32(ForwardingTunnel)),
		nl.Uint32Attr(uint32(r.weight)), nl.Uint32Attr(0), nl.Uint32Attr(0), // no thresholds
		nil, nil, nil, nil, nil, nil, []byte{r.forwarding.tunnel()}, port, flags)
}

// nest returns an attribute with others in it, which are numbered from 1.
func nest(typ int, values ...[]byte) *nl.RtAttr {
	a := nl.NewRtAttr(typ, nil)
	for i, v := range values {
		if v != nil {
			a.AddRtAttr(i+1, v)
		}
	}
	return a
}

func bigEndian(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }
