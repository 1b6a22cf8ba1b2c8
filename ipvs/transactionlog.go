package ipvs

import (
	"context"
	"net/netip"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// log logs a write at [dataplane.LevelTransaction], in the words of a [Renderer].
func (r *recorder) log(write func(kernel) error) {
	ctx, log := context.Background(), r.config.Log
	if !log.Enabled(ctx, dataplane.LevelTransaction) {
		return
	}
	r.inputs = nil
	_ = write(r) // a recorder does not fail
	for _, in := range r.inputs {
		log.Log(ctx, dataplane.LevelTransaction, "ipvs: write", "program", in.program, "input", in.text.String())
	}
}

// writes is a kernel that passes each write to a function, which makes it.
type writes struct {
	kernel
	through func(write func(kernel) error) error
}

func (w writes) setParameters(list []parameter) error {
	return w.through(func(k kernel) error { return k.setParameters(list) })
}

func (w writes) addVirtual(k virtualKey, v virtual) error {
	return w.through(func(to kernel) error { return to.addVirtual(k, v) })
}

func (w writes) setVirtual(k virtualKey, v virtual) error {
	return w.through(func(to kernel) error { return to.setVirtual(k, v) })
}

func (w writes) delVirtual(k virtualKey) error {
	return w.through(func(to kernel) error { return to.delVirtual(k) })
}

func (w writes) addReal(k virtualKey, r real) error {
	return w.through(func(to kernel) error { return to.addReal(k, r) })
}

func (w writes) setReal(k virtualKey, r real) error {
	return w.through(func(to kernel) error { return to.setReal(k, r) })
}

func (w writes) delReal(k virtualKey, at netip.AddrPort) error {
	return w.through(func(to kernel) error { return to.delReal(k, at) })
}

func (w writes) setTimeouts(t Timeouts) error {
	return w.through(func(k kernel) error { return k.setTimeouts(t) })
}

func (w writes) createSet(s setID, f tracker.Family) error {
	return w.through(func(k kernel) error { return k.createSet(s, f) })
}

func (w writes) destroySet(s setID, f tracker.Family) error {
	return w.through(func(k kernel) error { return k.destroySet(s, f) })
}

func (w writes) addEntries(s setID, f tracker.Family, list []entry, marks map[entry]uint32) error {
	return w.through(func(k kernel) error { return k.addEntries(s, f, list, marks) })
}

func (w writes) delEntries(s setID, f tracker.Family, list []entry) error {
	return w.through(func(k kernel) error { return k.delEntries(s, f, list) })
}

func (w writes) ensureDevice() error { return w.through(kernel.ensureDevice) }

func (w writes) removeDevice() error { return w.through(kernel.removeDevice) }

func (w writes) bind(a netip.Addr) error {
	return w.through(func(k kernel) error { return k.bind(a) })
}

func (w writes) unbind(a netip.Addr) error {
	return w.through(func(k kernel) error { return k.unbind(a) })
}

func (w writes) restoreMarks(wanted bool) error {
	return w.through(func(k kernel) error { return k.restoreMarks(wanted) })
}

func (w writes) restoreRules(ctx context.Context, f tracker.Family, input string) error {
	return w.through(func(k kernel) error { return k.restoreRules(ctx, f, input) })
}
