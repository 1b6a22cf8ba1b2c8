//go:build linux

package iptables

import (
	"net/netip"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// table is one of the kernel's tables.
type table uint8

const (
	filter table = iota
	nat
	tables // how many there are
)

func (t table) String() string {
	return [...]string{"filter", "nat"}[t]
}

// chain is a chain and all of its rules. Each rule has no "-A NAME " in front and is
// exactly as iptables-save prints it, so that the chain can be compared with the kernel's.
type chain struct {
	table table
	name  string
	rules []string
	// rank orders chains: a chain comes after the chains that it jumps to.
	rank int
}

// The ranks of chains: see chain.rank. Groups of endpoints come before
// rankService, the deepest first; the chains of a dispatcher after rankDispatch,
// likewise.
const (
	rankMark = iota
	rankEndpoint
	rankGroup    // to rankGroup + maxGroupDepth
	rankService  = rankGroup + maxGroupDepth + 1
	rankExternal = rankService + 1
	rankFirewall = rankExternal + 1
	rankDispatch = rankFirewall + 1 // to rankDispatch + maxKeyBits
	rankFirst    = rankDispatch + maxKeyBits + 1
	rankTop      = rankFirst + 1
	rankCanary   = rankTop + 1
)

// protocolName returns the name of a protocol in iptables, "" for one that Services
// cannot have.
func protocolName(p v1.Protocol) string {
	switch p {
	case v1.ProtocolTCP:
		return "tcp"
	case v1.ProtocolUDP:
		return "udp"
	case v1.ProtocolSCTP:
		return "sctp"
	}
	return ""
}

// comment returns the match that carries a text. It replaces every character that could
// end the text or the line, or that iptables could interpret.
func comment(text ...string) string {
	var b strings.Builder
	b.WriteString(`-m comment --comment "`)
	n := 0
	for _, t := range text {
		for i := 0; i < len(t) && n < maxComment; i++ {
			c := t[i]
			switch {
			case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte(" -._/:>;(),", c) >= 0:
			default:
				c = '?'
			}
			b.WriteByte(c)
			n++
		}
	}
	b.WriteByte('"')
	return b.String()
}

// maxComment is how many bytes a comment can have: XT_MAX_COMMENT_LEN in the
// kernel's linux/netfilter/xt_comment.h, less the NUL.
const maxComment = 255

// join joins the parts of a rule that are not empty with blanks.
func join(parts ...string) string {
	n := 0
	for _, p := range parts {
		n += len(p) + 1
	}
	var b strings.Builder
	b.Grow(n)
	for _, p := range parts {
		if p == "" {
			continue
		}
		if b.Len() != 0 {
			b.WriteByte(' ')
		}
		b.WriteString(p)
	}
	return b.String()
}

// host returns the prefix of one address.
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func source(p netip.Prefix) string      { return "-s " + p.String() }
func destination(p netip.Prefix) string { return "-d " + p.String() }

func jump(to string) string { return "-j " + to }

// destinationPort returns the match of a destination port. The rule must match the
// protocol first.
func destinationPort(protocol string, port uint16) string {
	return "-m " + protocol + " --dport " + strconv.Itoa(int(port))
}

// probability returns the match of a share of new connections, part of whole. The kernel
// counts in parts of 1<<31 (xt_statistic), so the share is rounded.
func probability(part, whole int) string {
	n := (uint64(part)<<31 + uint64(whole)/2) / uint64(whole)
	return "-m statistic --mode random --probability " + strconv.FormatFloat(float64(n)/(1<<31), 'f', 11, 64)
}

// reject returns the target that refuses packets as kube-proxy does.
func reject(f tracker.Family) string {
	if f == tracker.IPv6 {
		return "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return "-j REJECT --reject-with icmp-port-unreachable"
}

// loopback returns the family's loopback range.
func loopback(f tracker.Family) netip.Prefix {
	if f == tracker.IPv6 {
		return netip.PrefixFrom(netip.IPv6Loopback(), 128)
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
}
