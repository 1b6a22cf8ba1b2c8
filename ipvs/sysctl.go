package ipvs

import (
	"context"
	"fmt"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

type parameter struct {
	// name is the path below /proc/sys, such as "net/ipv4/ip_forward".
	name, value string
}

// parameters returns the parameters that [SetSysctls] sets in a kernel of the release, as uname -r prints it
// (Documentation/networking/ipvs-sysctl.rst and ip-sysctl.rst of the kernel).
func (c Config) parameters(release string) []parameter {
	out := []parameter{
		// Masquerading needs connection tracking of packets that IPVS forwards.
		{"net/ipv4/vs/conntrack", "1"},
		// A packet for a removed endpoint ends the connection, whose packets would otherwise be lost.
		{"net/ipv4/vs/expire_nodest_conn", "1"},
		// Client affinity does not keep a client with an endpoint of weight 0.
		{"net/ipv4/vs/expire_quiescent_template", "1"},
	}
	// From Linux 5.9 on, IPVS schedules a connection from a port that the client used before without delay (commit
	// f0a5e4d7a594, "ipvs: allow connection reuse for unconfirmed conntrack"). Older kernels delay it by a second,
	// unless the parameter is 0 and the connection goes to the previous one's endpoint. Kernels before 4.1 lack the
	// parameter.
	if atLeast(release, 4, 1) && !atLeast(release, 5, 9) {
		out = append(out, parameter{"net/ipv4/vs/conn_reuse_mode", "0"})
	}
	if slices.Contains(c.Families, tracker.IPv4) {
		out = append(out, parameter{"net/ipv4/ip_forward", "1"})
	}
	if c.StrictARP {
		out = append(out, parameter{"net/ipv4/conf/all/arp_ignore", "1"}, parameter{"net/ipv4/conf/all/arp_announce", "2"})
	}
	return out
}

// SetSysctls sets the kernel parameters that a [Backend] with the configuration needs, in the network namespace that
// c names, as the Backend's full deltas do unless KeepSysctls is set. It is for a privileged process that runs before
// a Backend without the right to write /proc/sys. It writes a parameter only if its value differs:
//
//	net.ipv4.vs.conntrack                  1
//	net.ipv4.vs.expire_nodest_conn         1
//	net.ipv4.vs.expire_quiescent_template  1
//	net.ipv4.vs.conn_reuse_mode            0 from Linux 4.1 to 5.8
//	net.ipv4.ip_forward                    1 with the family IPv4
//	net.ipv4.conf.all.arp_ignore           1 with StrictARP
//	net.ipv4.conf.all.arp_announce         2 with StrictARP
//
// IPv6 Services need net.ipv6.conf.all.forwarding, too, which the operator has to set: while it is 1 and accept_ra is
// not 2, the kernel ignores router advertisements and deletes the default routes that came by them.
//
// SetSysctls makes the kernel load the module ip_vs. The error is a [*dataplane.UnsupportedError] if the kernel has
// no IPVS. Otherwise it joins one error for each parameter that cannot be set. If ctx is done, SetSysctls sets none.
func SetSysctls(ctx context.Context, c Config) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b, err := openBackend(ctx, c, toSetParameters)
	if err != nil {
		return err
	}
	defer b.kernel.close()
	return b.kernel.setParameters(b.config.parameters(b.kernel.release()))
}

// atLeast reports whether a release is at least that version, or cannot be parsed.
func atLeast(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return true
	}
	return a > major || a == major && b >= minor
}
