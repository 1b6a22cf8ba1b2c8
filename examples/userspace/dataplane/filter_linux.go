package dataplane

import (
	"encoding/binary"
	"math"
	"net/netip"

	"golang.org/x/sys/unix"
)

// maxFilter is the most instructions a filter may have (BPF_MAXINSNS,
// include/uapi/linux/bpf_common.h).
const maxFilter = 4096

// networkHeader is the offset of the IP header in a socket's filter, whose packets begin
// with the transport header (SKF_NET_OFF, include/uapi/linux/filter.h).
const networkHeader = math.MaxUint32 - 0x100000 + 1

// accept and ignore are the results of a filter: the number of bytes of the packet to keep.
const accept, ignore = math.MaxUint32, 0

// filter returns a classic BPF program (Documentation/networking/filter.rst) with which a
// socket ignores packets from sources that are not in one prefix of each list. It returns nil
// if no program is needed or the program would be too long. Prefixes must be of the socket's
// family.
func filter(six bool, who audience) []unix.SockFilter {
	if len(who) == 0 {
		return nil
	}
	var prog []unix.SockFilter
	for _, prefixes := range who {
		var out []int // jumps to the end of the list
		for _, p := range prefixes {
			prog = append(prog, match(six, p)...)
			out = append(out, len(prog)-1)
		}
		prog = append(prog, ret(ignore))
		for _, i := range out {
			prog[i].K = uint32(len(prog) - i - 1)
		}
	}
	prog = append(prog, ret(accept))
	if len(prog) > maxFilter {
		return nil
	}
	return prog
}

// match returns instructions whose last one is a jump without a destination yet. The jump is
// reached if the source is in p; otherwise the instructions fall through.
func match(six bool, p netip.Prefix) []unix.SockFilter {
	source, addr := uint32(12), p.Addr().AsSlice() // of the IPv4 header
	if six {
		source = 8
	}
	var prog []unix.SockFilter
	bits := p.Bits()
	for at := 0; at < len(addr) && bits > 0; at, bits = at+4, bits-32 {
		mask := uint32(math.MaxUint32)
		if bits < 32 {
			mask <<= 32 - bits
		}
		prog = append(prog,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: networkHeader + source + uint32(at)},
			unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask},
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: binary.BigEndian.Uint32(addr[at:]) & mask})
	}
	prog = append(prog, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA})
	for i := range prog {
		if prog[i].Code == unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K {
			prog[i].Jf = uint8(len(prog) - i - 1)
		}
	}
	return prog
}

func ret(k uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k}
}
