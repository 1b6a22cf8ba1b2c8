package ipvs

import (
	"encoding/binary"
	"net/netip"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

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

// statisticsOf returns the counters in the kernel's message about a virtual server. ok is false if
// the message is about something else. Numbers are in the machine's byte order, except the port.
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

// counters64 returns the counters of a virtual server's statistics.
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
