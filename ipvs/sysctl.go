//go:build linux

package ipvs

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/sysctl"
	"github.com/go-proxier/proxier/tracker"
)

// Sysctl is a kernel parameter with the value it has to have.
type Sysctl struct {
	// Name is as below /proc/sys, e.g. "net/ipv4/ip_forward".
	Name string
	// Value is as the file has it, without the end of the line.
	Value string
}

// Sysctls returns the kernel parameters that a full delta sets for a configuration, in a
// kernel of the release (as uname -r tells it), unless they have their value
// already. All belong to the network namespace. They are described in the kernel's
// Documentation/networking/ipvs-sysctl.rst and ip-sysctl.rst.
//
// net.ipv6.conf.all.forwarding is not among them. IPv6 Services need it, but the
// kernel ignores router advertisements while it is 1, and drops the default routes
// that came by them, unless accept_ra is 2. The operator has to set both.
func Sysctls(c Config, release string) []Sysctl {
	out := []Sysctl{
		// Connections that IPVS forwards are tracked, which masquerading needs.
		{"net/ipv4/vs/conntrack", "1"},
		// A packet for an endpoint that was removed ends the connection, rather than
		// vanishing for as long as it lasts.
		{"net/ipv4/vs/expire_nodest_conn", "1"},
		// Client affinity does not hold on to an endpoint with weight 0.
		{"net/ipv4/vs/expire_quiescent_template", "1"},
	}
	// From Linux 5.9 on, a port that a client uses again is scheduled anew without
	// harm (commit f0a5e4d7a594, "ipvs: allow connection reuse for unconfirmed
	// conntrack"). Before, it cost a second each; without, connections go to where
	// the port's last one went. Before 4.1 there is no such parameter.
	if atLeast(release, 4, 1) && !atLeast(release, 5, 9) {
		out = append(out, Sysctl{"net/ipv4/vs/conn_reuse_mode", "0"})
	}
	families := c.Families
	if families == nil {
		families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	for _, f := range families {
		if f == tracker.IPv4 {
			out = append(out, Sysctl{"net/ipv4/ip_forward", "1"})
		}
	}
	if c.StrictARP {
		out = append(out, Sysctl{"net/ipv4/conf/all/arp_ignore", "1"}, Sysctl{"net/ipv4/conf/all/arp_announce", "2"})
	}
	return out
}

// SetSysctls sets the kernel parameters that [Sysctls] returns for the configuration
// and the running kernel, in the network namespace that c names. It writes those only
// that have another value. It is for a process that may write /proc/sys and runs before
// one that may not: the [Backend] of the second then finds them set. It ignores
// KeepSysctls.
//
// SetSysctls has the kernel load the module ip_vs, without which some of the parameters
// do not exist; if there is none it returns an [*UnsupportedError]. Otherwise the error
// joins one for each parameter that cannot be set.
func SetSysctls(c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	defer ns.Close()
	return ns.Do(func() error {
		k, err := dialKernel(c.Forwarding)
		if err != nil {
			return errNoIPVS(err)
		}
		k.close()
		var errs []error
		for _, s := range Sysctls(c, release()) {
			if err := s.set(); err != nil {
				errs = append(errs, fmt.Errorf("ipvs: %w", err))
			}
		}
		return errors.Join(errs...)
	})
}

// atLeast reports whether a release is that version or a later one. One that cannot
// be read is.
func atLeast(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return true
	}
	return a > major || a == major && b >= minor
}

// set writes the parameter in the calling thread's namespace if it differs.
func (s Sysctl) set() error { return sysctl.Set(s.Name, s.Value) }

func release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
