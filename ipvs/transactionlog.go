package ipvs

import (
	"context"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// logged is a kernel whose writes are logged one by one at [dataplane.LevelTransaction] before they are made, in the
// words of a [Renderer].
type logged struct {
	kernel
	words *recorder
}

func (l logged) log(say func(*recorder) error) {
	ctx, log := context.Background(), l.words.config.Log
	if !log.Enabled(ctx, dataplane.LevelTransaction) {
		return
	}
	l.words.inputs = nil
	_ = say(l.words) // a recorder does not fail
	for _, in := range l.words.inputs {
		log.Log(ctx, dataplane.LevelTransaction, "ipvs: write", "program", in.program, "input", in.text.String())
	}
}

func (l logged) setParameters(list []parameter) error {
	l.log(func(r *recorder) error {
		for _, p := range list {
			_ = r.write("sysctl -p -", strings.ReplaceAll(p.name, "/", ".")+" = "+p.value)
		}
		return nil
	})
	return l.kernel.setParameters(list)
}

func (l logged) addVirtual(k virtualKey, v virtual) error {
	l.log(func(r *recorder) error { return r.addVirtual(k, v) })
	return l.kernel.addVirtual(k, v)
}

func (l logged) setVirtual(k virtualKey, v virtual) error {
	l.log(func(r *recorder) error { return r.setVirtual(k, v) })
	return l.kernel.setVirtual(k, v)
}

func (l logged) delVirtual(k virtualKey) error {
	l.log(func(r *recorder) error { return r.delVirtual(k) })
	return l.kernel.delVirtual(k)
}

func (l logged) addReal(k virtualKey, to real) error {
	l.log(func(r *recorder) error { return r.addReal(k, to) })
	return l.kernel.addReal(k, to)
}

func (l logged) setReal(k virtualKey, to real) error {
	l.log(func(r *recorder) error { return r.setReal(k, to) })
	return l.kernel.setReal(k, to)
}

func (l logged) delReal(k virtualKey, at netip.AddrPort) error {
	l.log(func(r *recorder) error { return r.delReal(k, at) })
	return l.kernel.delReal(k, at)
}

func (l logged) setTimeouts(t Timeouts) error {
	l.log(func(r *recorder) error { return r.setTimeouts(t) })
	return l.kernel.setTimeouts(t)
}

func (l logged) createSet(s setID, f tracker.Family) error {
	l.log(func(r *recorder) error { return r.createSet(s, f) })
	return l.kernel.createSet(s, f)
}

func (l logged) destroySet(s setID, f tracker.Family) error {
	l.log(func(r *recorder) error { return r.write("ipset restore", "destroy "+s.name(f)) })
	return l.kernel.destroySet(s, f)
}

func (l logged) addEntries(s setID, f tracker.Family, list []entry, marks map[entry]uint32) error {
	l.log(func(r *recorder) error { return r.addEntries(s, f, list, marks) })
	return l.kernel.addEntries(s, f, list, marks)
}

func (l logged) delEntries(s setID, f tracker.Family, list []entry) error {
	l.log(func(r *recorder) error { return r.delEntries(s, f, list) })
	return l.kernel.delEntries(s, f, list)
}

func (l logged) ensureDevice() error {
	l.log(func(r *recorder) error { return r.ensureDevice() })
	return l.kernel.ensureDevice()
}

func (l logged) removeDevice() error {
	l.log(func(r *recorder) error { return r.write("ip -batch -", "link del "+deviceName) })
	return l.kernel.removeDevice()
}

func (l logged) bind(a netip.Addr) error {
	l.log(func(r *recorder) error { return r.write("ip -batch -", addressLine("add", a)) })
	return l.kernel.bind(a)
}

func (l logged) unbind(a netip.Addr) error {
	l.log(func(r *recorder) error { return r.write("ip -batch -", addressLine("del", a)) })
	return l.kernel.unbind(a)
}

func (l logged) restoreMarks(wanted bool) error {
	l.log(func(r *recorder) error { return r.restoreMarks(wanted) })
	return l.kernel.restoreMarks(wanted)
}

func (l logged) restoreRules(ctx context.Context, f tracker.Family, input string) error {
	l.log(func(r *recorder) error { return r.restoreRules(ctx, f, input) })
	return l.kernel.restoreRules(ctx, f, input)
}

// addressLine is a line of ip's batch that adds or deletes an address of the dummy device.
func addressLine(verb string, a netip.Addr) string {
	late := ""
	if verb == "add" && a.Is6() {
		late = " nodad"
	}
	return "addr " + verb + " " + iptext.Host(a).String() + " dev " + deviceName + late
}
