package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// kernel is one network namespace with everything that a Backend writes. Errors about a missing object that was in
// the kernel wrap [ruleset.ErrNeedFull].
type kernel interface {
	serverTable
	setTable
	addressTable
	ruleTable

	// setParameters sets kernel parameters. The error joins those of all parameters.
	setParameters([]parameter) error
	// release returns the kernel's release, as uname -r prints it.
	release() string
	// ipv6Disabled reports whether IPv6 is turned off.
	ipv6Disabled() (bool, error)
	// close releases the kernel's resources.
	close()
}

type serverTable interface {
	// virtuals calls fn with each virtual server of the family.
	virtuals(f tracker.Family, fn func(virtualKey, virtual)) error
	// reals calls fn with each real server of a virtual server. The error wraps ESRCH if
	// there is no such virtual server.
	reals(k virtualKey, fn func(real)) error
	// statistics returns the counters of each virtual server of the family.
	statistics(f tracker.Family) (map[virtualKey]dataplane.Counters, error)

	// addVirtual adds a virtual server, or sets the properties of an existing one. The
	// error wraps ENOENT if the kernel has no such scheduler.
	addVirtual(k virtualKey, v virtual) error
	setVirtual(k virtualKey, v virtual) error
	// delVirtual deletes a virtual server with its real servers, if it exists.
	delVirtual(k virtualKey) error
	// addReal adds a real server, or sets the properties of an existing one. The error wraps
	// EINVAL if the kernel does not accept the address.
	addReal(virtualKey, real) error
	setReal(virtualKey, real) error
	// delReal deletes a real server if it exists.
	delReal(k virtualKey, at netip.AddrPort) error

	// setTimeouts sets the timeouts that are not 0.
	setTimeouts(Timeouts) error

	// connections calls fn, for each TCP connection in connection tracking that has not ended, with its
	// original destination and with the source of its answers.
	connections(f tracker.Family, fn func(...netip.AddrPort)) error
}

type setTable interface {
	// hasSets returns an error if the kernel has no sets.
	hasSets() error
	// createSet creates a set unless it exists.
	createSet(s setID, f tracker.Family) error
	// destroySet destroys a set if it exists, unless a rule uses it.
	destroySet(s setID, f tracker.Family) error
	// listSet calls fn with each element of a set and its packet mark, 0 if it has none.
	// The error wraps ENOENT if there is no such set.
	listSet(s setID, f tracker.Family, fn func(e entry, mark uint32)) error
	// addEntries adds elements to a set, or some of them if it returns an error. An
	// existing element gets the mark. The error wraps errSetFull if the set has no room.
	addEntries(s setID, f tracker.Family, list []entry, marks map[entry]uint32) error
	// delEntries deletes the elements that exist.
	delEntries(s setID, f tracker.Family, list []entry) error
}

// errSetFull is the error of adding to a set that has its largest number of elements.
var errSetFull = errors.New("the set is full")

// addressTable holds addresses, with the dummy device.
type addressTable interface {
	// ensureDevice adds the dummy device if it is missing.
	ensureDevice() error
	// findDevice returns an error unless the device is the one that ensureDevice found.
	findDevice() error
	// removeDevice deletes the device if it exists and is a dummy device.
	removeDevice() error
	// addresses calls bound with the device's addresses and own with the node's other
	// addresses, except loopback addresses.
	addresses(f tracker.Family, bound, own func(netip.Addr)) error
	// addressesChanged reports whether an address of the node was added to or deleted from
	// another device since the last call. It does not block.
	addressesChanged() (bool, error)
	// bind adds an address to the device unless the device has it.
	bind(netip.Addr) error
	// unbind deletes an address from the device if the device has it.
	unbind(netip.Addr) error
	// waitLocal waits until the addresses are local.
	waitLocal(context.Context, []netip.Addr) error
}

// ruleTable holds netfilter rules, in the syntax of iptables.
type ruleTable interface {
	// savedRules returns all rules, as iptables-save writes them. The error wraps
	// [exec.ErrNotFound] if there is no iptables.
	savedRules(context.Context, tracker.Family) (iptext.Saved, error)
	// restoreMarks adds chains right before IPVS, or deletes them if wanted is false. In new connections whose mark
	// has all bits of markDrop, they clear all bits but markBits. The error wraps [errors.ErrUnsupported] if the
	// kernel lacks nf_tables.
	restoreMarks(wanted bool) error
	// marksRestored returns an error if these chains or their rules are missing.
	marksRestored() error
	// restoreRules makes changes, as iptables-restore --noflush does.
	restoreRules(ctx context.Context, f tracker.Family, input string) error
}

// virtualKey identifies a virtual server by address, port and protocol, or by a packet
// mark.
type virtualKey struct {
	family tracker.Family
	proto  uint8 // 0 with a mark
	at     netip.AddrPort
	mark   uint32
}

// String names a virtual server as ipvsadm does.
func (k virtualKey) String() string {
	switch {
	case k.mark != 0:
		return fmt.Sprintf("FWM %d %s", k.mark, k.family)
	case k.proto == inet.TCP:
		return "TCP " + k.at.String()
	case k.proto == inet.UDP:
		return "UDP " + k.at.String()
	case k.proto == inet.SCTP:
		return "SCTP " + k.at.String()
	}
	return fmt.Sprintf("protocol %d %s", k.proto, k.at)
}

func (k virtualKey) compare(o virtualKey) int {
	return cmp.Or(cmp.Compare(k.proto, o.proto), k.at.Compare(o.at), cmp.Compare(k.mark, o.mark))
}

type virtual struct {
	scheduler Scheduler
	flags     uint32
	// timeout is the timeout of persistence, in seconds.
	timeout uint32
}

type real struct {
	at               netip.AddrPort
	weight           uint16
	forwarding       Forwarding
	active, inactive int
}

// wrap adds the failed operation and its object to an error, which wraps [ruleset.ErrNeedFull] if an object is
// missing that was in the kernel.
func wrap(err error, what string, key virtualKey) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ESRCH), errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("%w: %s %s: %w", ruleset.ErrNeedFull, what, key, err)
	}
	return fmt.Errorf("%s %s: %w", what, key, err)
}
