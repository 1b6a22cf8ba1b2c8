package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"

	v1 "k8s.io/api/core/v1"
)

// recorder is the kernel of a [Renderer]. It records each write as a line of the program that makes it, and has only
// what was written.
type recorder struct {
	config  Config
	backend *Backend
	inputs  []*recorded
	// node is the node, and own its addresses on other devices.
	node *ruleset.Node
	own  []netip.Addr
	// bound holds the addresses of the dummy device, or is nil if they are not known.
	bound map[netip.Addr]bool
	// idle is set if no real server has connections.
	idle bool
}

type recorded struct {
	program string
	text    strings.Builder
}

var _ kernel = &recorder{}

func (r *recorder) write(program string, lines ...string) error {
	if last := len(r.inputs) - 1; last < 0 || r.inputs[last].program != program {
		r.inputs = append(r.inputs, &recorded{program: program})
	}
	text := &r.inputs[len(r.inputs)-1].text
	for _, l := range lines {
		text.WriteString(l)
		text.WriteByte('\n')
	}
	return nil
}

func (r *recorder) servers(format string, args ...any) error {
	return r.write("ipvsadm -R", fmt.Sprintf(format, args...))
}

func (r *recorder) release() string                                          { return "" }
func (r *recorder) ipv6Disabled() (bool, error)                              { return false, nil }
func (r *recorder) close()                                                   {}
func (r *recorder) virtuals(tracker.Family, func(virtualKey, virtual)) error { return nil }
func (r *recorder) hasSets() error                                           { return nil }
func (r *recorder) findDevice() error                                        { return nil }
func (r *recorder) marksRestored() error                                     { return nil }
func (r *recorder) waitLocal(context.Context, []netip.Addr) error            { return nil }
func (r *recorder) listSet(setID, tracker.Family, func(entry, uint32)) error { return nil }
func (r *recorder) statistics(tracker.Family) (map[virtualKey]dataplane.Counters, error) {
	return nil, nil
}

func (r *recorder) setParameters(list []parameter) error {
	for _, p := range list {
		_ = r.write("sysctl -p -", strings.ReplaceAll(p.name, "/", ".")+" = "+p.value)
	}
	return nil
}

func (r *recorder) virtual(k virtualKey) *virtualState {
	for _, s := range r.backend.states {
		if s.family == k.family {
			return s.virtuals[k]
		}
	}
	return nil
}

func (r *recorder) forwarding(k virtualKey) Forwarding {
	if v := r.virtual(k); v != nil {
		return v.forwarding
	}
	return ForwardingTranslated
}

func (r *recorder) reals(k virtualKey, fn func(real)) error {
	active := 1
	if r.idle {
		active = 0
	}
	if v := r.virtual(k); v != nil {
		for at, weight := range v.reals {
			fn(real{at: at, weight: weight, forwarding: v.forwarding, active: active})
		}
	}
	return nil
}

func (r *recorder) connections(tracker.Family, func(...netip.AddrPort)) error { return nil }

func (r *recorder) addVirtual(k virtualKey, v virtual) error {
	return r.servers("-A %s %s", k.text(), v.text())
}

func (r *recorder) setVirtual(k virtualKey, v virtual) error {
	return r.servers("-E %s %s", k.text(), v.text())
}

func (r *recorder) delVirtual(k virtualKey) error { return r.servers("-D %s", k.text()) }

func (r *recorder) addReal(k virtualKey, to real) error {
	return r.servers("-a %s -r %s %s", k.text(), to.forwarding.port(k, to.at), to.text())
}

func (r *recorder) setReal(k virtualKey, to real) error {
	now, before := to.forwarding.port(k, to.at), r.forwarding(k).port(k, to.at)
	if now == before {
		return r.servers("-e %s -r %s %s", k.text(), now, to.text())
	}
	_ = r.addReal(k, to)
	return r.servers("-d %s -r %s", k.text(), before)
}

func (r *recorder) delReal(k virtualKey, at netip.AddrPort) error {
	return r.servers("-d %s -r %s", k.text(), r.forwarding(k).port(k, at))
}

func (r *recorder) setTimeouts(t Timeouts) error {
	if t == (Timeouts{}) {
		return nil
	}
	return r.servers("--set %d %d %d", t.TCP/time.Second, t.TCPFin/time.Second, t.UDP/time.Second)
}

func (r *recorder) createSet(s setID, f tracker.Family) error {
	typeName, _ := sets[s].kind.typeName()
	options := " range 0-65535"
	if sets[s].kind != bitmapPort {
		family := "inet"
		if f == tracker.IPv6 {
			family = "inet6"
		}
		options = fmt.Sprintf(" family %s maxelem %d", family, maxElements)
	}
	if sets[s].kind == hashIPPortMark {
		options += " skbinfo"
	}
	return r.write("ipset restore", "create "+s.name(f)+" "+typeName+options+" -exist")
}

func (r *recorder) destroySet(s setID, f tracker.Family) error {
	return r.write("ipset restore", "destroy "+s.name(f))
}

func (r *recorder) addEntries(s setID, f tracker.Family, list []entry, marks map[entry]uint32) error {
	var lines []string
	for _, e := range list {
		mark := ""
		if m := marks[e]; m != 0 {
			mark = fmt.Sprintf(" skbmark %#x", m)
		}
		lines = append(lines, "add "+s.name(f)+" "+e.text()+mark+" -exist")
	}
	return r.write("ipset restore", lines...)
}

func (r *recorder) delEntries(s setID, f tracker.Family, list []entry) error {
	var lines []string
	for _, e := range list {
		lines = append(lines, "del "+s.name(f)+" "+e.text()+" -exist")
	}
	return r.write("ipset restore", lines...)
}

func (r *recorder) ensureDevice() error {
	return r.write("ip -batch -", "link add "+deviceName+" type dummy")
}

func (r *recorder) removeDevice() error { return r.write("ip -batch -", "link del "+deviceName) }

func (r *recorder) bind(a netip.Addr) error {
	if r.bound[a] {
		return nil
	}
	if r.bound != nil {
		r.bound[a] = true
	}
	late := ""
	if a.Is6() {
		late = " nodad"
	}
	return r.write("ip -batch -", "addr add "+iptext.Host(a).String()+" dev "+deviceName+late)
}

func (r *recorder) unbind(a netip.Addr) error {
	delete(r.bound, a)
	return r.write("ip -batch -", "addr del "+iptext.Host(a).String()+" dev "+deviceName)
}

func (r *recorder) addresses(f tracker.Family, _, own func(netip.Addr)) error {
	for _, a := range r.own {
		if tracker.FamilyOf(a) == f && !a.IsLoopback() {
			own(a)
		}
	}
	return nil
}

func (r *recorder) addressesChanged() (bool, error) { return true, nil }

func (r *recorder) savedRules(_ context.Context, f tracker.Family) (iptext.Saved, error) {
	if _, ok := r.backend.rules[f]; !ok {
		return nil, nil
	}
	saved := iptext.Saved{}
	for _, t := range r.config.rules(f, r.node).tables() {
		saved[t.name] = map[string][]string{}
		for _, j := range t.jumps {
			saved[t.name][j.from] = append(saved[t.name][j.from], j.rule)
		}
	}
	return saved, nil
}

func (r *recorder) restoreRules(_ context.Context, f tracker.Family, input string) error {
	program := "iptables-restore --noflush"
	if f == tracker.IPv6 {
		program = "ip6tables-restore --noflush"
	}
	return r.write(program, strings.TrimSuffix(input, "\n"))
}

func (r *recorder) restoreMarks(wanted bool) error { return r.write("nft -f -", marksInput(wanted)...) }

// marksInput returns the lines of nft that make the table marksTable as it is wanted, whatever it was.
func marksInput(wanted bool) []string {
	lines := []string{"table inet " + marksTable, "delete table inet " + marksTable}
	if !wanted {
		return lines
	}
	lines = append(lines, "table inet "+marksTable+" {")
	for _, hook := range slices.Sorted(maps.Keys(markPriorities)) {
		lines = append(lines, "\tchain "+hook+" {",
			fmt.Sprintf("\t\ttype filter hook %s priority %d; policy accept;", hook, markPriorities[hook]),
			fmt.Sprintf("\t\tct state new meta mark & %#x == %#x meta mark set meta mark & %#x", markDrop, markDrop, markBits), "\t}")
	}
	return append(lines, "}")
}

func (k virtualKey) text() string {
	switch {
	case k.mark != 0 && k.family == tracker.IPv6:
		return fmt.Sprintf("-f %d -6", k.mark)
	case k.mark != 0:
		return fmt.Sprintf("-f %d", k.mark)
	}
	return map[v1.Protocol]string{v1.ProtocolTCP: "-t ", v1.ProtocolUDP: "-u ", v1.ProtocolSCTP: "--sctp-service "}[inet.ProtocolOf(k.proto)] + k.at.String()
}

func (v virtual) text() string {
	out := "-s " + string(v.scheduler)
	if v.flags&flagPersistent != 0 {
		out += fmt.Sprintf(" -p %d", v.timeout)
	}
	if v.flags&flagOnePacket != 0 {
		out += " -o"
	}
	var list []string
	if v.flags&flagFallback != 0 {
		list = append(list, string(v.scheduler)+"-fallback")
	}
	if v.flags&flagPort != 0 {
		list = append(list, string(v.scheduler)+"-port")
	}
	if len(list) != 0 {
		out += " -b " + strings.Join(list, ",")
	}
	return out
}

// port returns a real server's address with the port that ipvsadm gives it: if packets are not translated, that of
// the virtual server.
func (f Forwarding) port(k virtualKey, at netip.AddrPort) netip.AddrPort {
	if f != ForwardingTranslated {
		return netip.AddrPortFrom(at.Addr(), k.at.Port())
	}
	return at
}

// text returns the real server's properties in the syntax of ipvsadm.
func (r real) text() string {
	how := map[Forwarding]string{
		ForwardingTranslated: "-m -w %d", ForwardingDirect: "-g -w %d", ForwardingTunnel: "-i -w %d",
		ForwardingGUE: "-i -w %d --tun-type gue --tun-port " + fmt.Sprint(portGUE), ForwardingGRE: "-i -w %d --tun-type gre",
	}
	return fmt.Sprintf(how[r.forwarding], r.weight)
}

func (e entry) text() string {
	kind := sets[e.set].kind
	switch kind {
	case bitmapPort:
		return fmt.Sprint(e.port)
	case hashIP:
		return e.addr.String()
	}
	out := fmt.Sprintf("%s,%s:%d", e.addr, strings.ToLower(string(inet.ProtocolOf(e.proto))), e.port)
	switch kind {
	case hashIPPortIP:
		out += "," + e.other.Addr().String()
	case hashIPPortNet:
		out += "," + e.other.String()
	}
	return out
}
