//go:build linux

package main

import (
	"fmt"
	"syscall"
	"time"
)

// fault is something that goes wrong. run returns what it did, for the record of the world.
type fault struct {
	name string
	run  func(*world) (string, error)
}

// shell returns a fault that runs a shell command on the node. The command may fail, for
// example because what it deletes does not exist.
func shell(name, text string) fault {
	return fault{name, func(w *world) (string, error) { return w.shell(text), nil }}
}

// commonFaults are the faults of every mode.
var commonFaults = []fault{
	{"SIGKILL", func(w *world) (string, error) { return "", w.restart(syscall.SIGKILL, nil) }},
	{"SIGTERM", func(w *world) (string, error) {
		return "", w.restart(syscall.SIGTERM, func() {
			for range 3 {
				w.objects.step()
			}
		})
	}},
	{"SIGSTOP", func(w *world) (string, error) {
		d := time.Duration(w.rng.IntN(1200)) * time.Millisecond
		p := w.agent.cmd.Process
		p.Signal(syscall.SIGSTOP)
		time.AfterFunc(d, func() { p.Signal(syscall.SIGCONT) })
		return d.String(), nil
	}},
	{"watches end", func(w *world) (string, error) { w.server.endWatches(false); return "", nil }},
	{"watches expire", func(w *world) (string, error) { w.server.endWatches(true); return "", nil }},
	{"requests fail", func(w *world) (string, error) {
		n, expire := 1+w.rng.IntN(2), w.rng.IntN(2) == 0
		w.server.misbehave(func(m *misbehavior) { m.fail = n })
		w.server.endWatches(expire)
		return fmt.Sprintf("%d, expired %t", n, expire), nil
	}},
	{"odd events", func(w *world) (string, error) {
		n := w.rng.IntN(16)
		w.server.misbehave(func(m *misbehavior) {
			m.retype, m.duplicate, m.bookmarks, m.slow = n&1 != 0, n&2 != 0, n&4 != 0, n&8 != 0
		})
		return fmt.Sprint(n), nil
	}},
	{"address", func(w *world) (string, error) {
		a := pick(w.rng, otherAddr4+"/24", otherAddr6+"/64", "10.96.0.3/32")
		return a, w.node.toggle(a)
	}},
	{"interface", func(w *world) (string, error) {
		l := pick(w.rng, "veth0", "veth1", "other0")
		return l, w.node.toggle(l)
	}},
}
