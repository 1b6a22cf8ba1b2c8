package ipvs

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/tracker"
)

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

// tunnels returns the types of the tunnels to a virtual server's real servers.
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

// attribute returns the attribute that names a virtual server.
func (key virtualKey) attribute() *nl.RtAttr {
	family := nl.Uint16Attr(uint16(inet.AF(key.family)))
	if key.mark != 0 {
		return nest(attrService, family, nil, nil, nil, nl.Uint32Attr(key.mark))
	}
	return nest(attrService, family, nl.Uint16Attr(uint16(key.proto)), key.at.Addr().AsSlice(), bigEndian(key.at.Port()))
}

// attribute returns the attribute of a real server behind a tunnel.
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
