package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// counted lists the counters that IPVS has.
const counted = dataplane.CountsConnections | dataplane.CountsPackets | dataplane.CountsBytes

// Traffic reads the kernel's statistics of the virtual servers, which the kernel sums up every two seconds
// (net/netfilter/ipvs/ip_vs_est.c). Known is connections, packets and bytes. A virtual server keeps its statistics
// while its Service and endpoints change, and when another process takes over.
//
// Before the first full delta Traffic returns the counters of the function [Traffic], by destination. The error is
// ctx's, [os.ErrClosed], or that of reading from the kernel.
func (b *Backend) Traffic(ctx context.Context) (out *dataplane.Traffic, err error) {
	err = b.do(ctx, func() error {
		if b.states == nil {
			out, err = b.unnamedTraffic(ctx)
			return err
		}
		out = &dataplane.Traffic{Known: counted, Services: map[tracker.Key]dataplane.Counters{}}
		for _, s := range b.states {
			stats, err := b.kernel.statistics(s.family)
			if err != nil {
				return fmt.Errorf("ipvs: cannot read traffic: %w", err)
			}
			for k, c := range stats {
				if v := s.virtuals[k]; v != nil && s.servers.Users(k) != 0 {
					total := out.Services[v.service]
					total.Add(c)
					out.Services[v.service] = total
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Traffic reads the kernel's statistics of the virtual servers, as [Backend.Traffic] does, without a [Backend]. IPVS
// does not store names of Services, so the counters are in [dataplane.Traffic] Unnamed, by destination. Internal
// traffic with a virtual server of its own counts for one of the Service's destinations. Virtual servers of other
// programs are included, except those in ExcludeCIDRs.
//
// The error wraps [dataplane.ErrNoRules] if the dummy device is missing.
func Traffic(ctx context.Context, c Config) (*dataplane.Traffic, error) {
	b, err := inspect(ctx, c, "read traffic")
	if err != nil {
		return nil, err
	}
	defer b.kernel.close()
	return b.unnamedTraffic(ctx)
}

func (b *Backend) unnamedTraffic(ctx context.Context) (*dataplane.Traffic, error) {
	out := &dataplane.Traffic{Known: counted, Unnamed: map[dataplane.Destination]dataplane.Counters{}}
	for _, f := range b.config.Families {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		stats, err := b.kernel.statistics(f)
		var marks map[uint32]dataplane.Destination
		if err == nil {
			marks, err = b.markedDestinations(f)
		}
		if err != nil {
			return nil, fmt.Errorf("ipvs: cannot read traffic: %w", err)
		}
		for k, c := range stats {
			to, known := dataplane.Destination{Addr: k.at, Protocol: inet.ProtocolOf(k.proto)}, true
			if k.mark != 0 {
				to, known = marks[k.mark]
			}
			if !known || b.config.excluded(to.Addr.Addr()) {
				continue
			}
			total := out.Unnamed[to]
			total.Add(c)
			out.Unnamed[to] = total
		}
	}
	return out, nil
}

// markedDestinations returns, for each mark, the first destination whose internal traffic gets
// it.
func (b *Backend) markedDestinations(f tracker.Family) (map[uint32]dataplane.Destination, error) {
	out := map[uint32]dataplane.Destination{}
	err := b.kernel.listSet(setShortCircuit, f, func(e entry, mark uint32) {
		to := dataplane.Destination{Addr: netip.AddrPortFrom(e.addr, e.port), Protocol: inet.ProtocolOf(e.proto)}
		if first, ok := out[mark]; !ok || to.Addr.Compare(first.Addr) < 0 {
			out[mark] = to
		}
	})
	if errors.Is(err, syscall.ENOENT) {
		err = nil // kube-proxy has no such set
	}
	return out, err
}

// Numbers of include/uapi/linux/ip_vs.h.
const (
	getService = 4 // IPVS_CMD_GET_SERVICE
	newServer  = 5 // IPVS_CMD_NEW_DEST
	setServer  = 6 // IPVS_CMD_SET_DEST
	getServer  = 8 // IPVS_CMD_GET_DEST

	attrService = 1 // IPVS_CMD_ATTR_SERVICE
	attrServer  = 2 // IPVS_CMD_ATTR_DEST

	serviceFamily   = 1  // IPVS_SVC_ATTR_AF
	serviceProtocol = 2  // IPVS_SVC_ATTR_PROTOCOL
	serviceAddress  = 3  // IPVS_SVC_ATTR_ADDR
	servicePort     = 4  // IPVS_SVC_ATTR_PORT
	serviceMark     = 5  // IPVS_SVC_ATTR_FWMARK
	serviceStats64  = 12 // IPVS_SVC_ATTR_STATS64, since Linux 4.1

	statsConnections = 1 // IPVS_STATS_ATTR_CONNS
	statsPacketsIn   = 2 // IPVS_STATS_ATTR_INPKTS
	statsPacketsOut  = 3 // IPVS_STATS_ATTR_OUTPKTS
	statsBytesIn     = 4 // IPVS_STATS_ATTR_INBYTES
	statsBytesOut    = 5 // IPVS_STATS_ATTR_OUTBYTES
)

// statisticsOf returns the counters in the kernel's message about a virtual server. ok is false if the message is
// about something else.
func statisticsOf(message []byte) (key virtualKey, c dataplane.Counters, ok bool) {
	const header = 4 // struct genlmsghdr
	var address [16]byte
	var port uint16
	for typ, service := range nfnl.Attributes(message[min(header, len(message)):]) {
		if typ != attrService {
			continue
		}
		for typ, data := range nfnl.Attributes(service) {
			switch typ {
			case serviceFamily:
				for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
					if uint64(inet.AF(f)) == number(data) {
						key.family = f
					}
				}
			case serviceProtocol:
				key.proto = uint8(number(data))
			case serviceAddress:
				copy(address[:], data)
			case servicePort:
				port = nfnl.Uint16(data)
			case serviceMark:
				key.mark = uint32(number(data))
			case serviceStats64:
				c = counters64(data)
			}
		}
	}
	switch {
	case key.family == 0:
		return virtualKey{}, dataplane.Counters{}, false
	case key.mark != 0:
		key.proto = 0
	case key.family == tracker.IPv4:
		key.at = netip.AddrPortFrom(netip.AddrFrom4([4]byte(address[:])), port)
	default:
		key.at = netip.AddrPortFrom(netip.AddrFrom16(address), port)
	}
	return key, c, true
}

func counters64(stats []byte) (c dataplane.Counters) {
	for typ, data := range nfnl.Attributes(stats) {
		switch typ {
		case statsConnections:
			c.Connections = number(data)
		case statsPacketsIn, statsPacketsOut:
			c.Packets += number(data)
		case statsBytesIn, statsBytesOut:
			c.Bytes += number(data)
		}
	}
	return c
}

// number returns the number of 2, 4 or 8 bytes in an attribute's data, or 0.
func number(data []byte) uint64 {
	switch len(data) {
	case 2:
		return uint64(binary.NativeEndian.Uint16(data))
	case 4:
		return uint64(binary.NativeEndian.Uint32(data))
	case 8:
		return binary.NativeEndian.Uint64(data)
	}
	return 0
}
