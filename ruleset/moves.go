package ruleset

import "github.com/go-proxier/proxier/tracker"

// link finds frontends that move between two changes. It records in the change that
// gains a frontend which Service loses it, and moves that change before the one that
// loses it. Without such changes it returns immediately.
func link(changes []Change) {
	winners := 0
	for i := range changes {
		winners += len(changes[i].lost)
	}
	if winners == 0 {
		return
	}
	byKey := make(map[tracker.Key]int, len(changes))
	for i := range changes {
		byKey[changes[i].Key] = i
	}
	for i := range changes {
		for _, m := range changes[i].lost {
			if w, ok := byKey[m.key]; ok {
				changes[w].taken = append(changes[w].taken, move{m.at, changes[i].Key})
			}
		}
	}

	// Depth first: a change comes after the changes to which it loses a frontend. If
	// one of these is still being visited, the changes form a circle, which has no
	// such order.
	out := make([]Change, 0, len(changes))
	opened := make([]bool, len(changes))
	var visit func(i int)
	visit = func(i int) {
		if opened[i] {
			return
		}
		opened[i] = true
		for _, m := range changes[i].lost {
			if w, ok := byKey[m.key]; ok {
				visit(w)
			}
		}
		out = append(out, changes[i])
	}
	for i := range changes {
		visit(i)
	}
	copy(changes, out)
}
