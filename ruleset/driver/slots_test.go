package driver_test

import (
	"errors"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/go-proxier/proxier/ruleset/driver"
)

var errSlot = errors.New("write failed")

// slotPlane is a data slotPlane with entries and a stored size.
type slotPlane struct {
	t       *testing.T
	entries map[int][2]int // key and value
	size    int
	fails   func() bool
	half    func() bool // whether a failed write takes effect
	writes  int
}

// look checks that a packet finds an entry in every slot below the size.
func (p *slotPlane) look() {
	p.t.Helper()
	for i := range p.size {
		if _, ok := p.entries[i]; !ok {
			p.t.Errorf("slot %d of %d is empty", i, p.size)
		}
	}
}

func (p *slotPlane) do(f func()) error {
	p.writes++
	if p.fails() {
		if p.half() {
			f()
			p.look()
		}
		return errSlot
	}
	f()
	p.look()
	return nil
}

// sync writes a table to the data slotPlane.
func (p *slotPlane) sync(s *driver.Slots[int, int]) error {
	if err := s.Write(func(slot, k, v int) error {
		return p.do(func() { p.entries[slot] = [2]int{k, v} })
	}); err != nil {
		return err
	}
	if err := p.do(func() { p.size = s.Len() }); err != nil {
		return err
	}
	return s.Trim(func(slot int) error { return p.do(func() { delete(p.entries, slot) }) })
}

// agree checks that the data slotPlane equals the model.
func (p *slotPlane) agree(s *driver.Slots[int, int], model map[int]int) {
	p.t.Helper()
	got := map[int]int{}
	for i := range p.size {
		e := p.entries[i]
		got[e[0]] = e[1]
		if at, ok := s.Slot(e[0]); !ok || at != i {
			p.t.Errorf("slot of %d is %d, %t; the data slotPlane has it at %d", e[0], at, ok, i)
		}
	}
	if !maps.Equal(got, model) || len(p.entries) != len(model) || p.size != len(model) {
		p.t.Errorf("the data slotPlane has %d slots and entries %v, want %v", p.size, p.entries, model)
	}
	if got := maps.Collect(s.All()); !maps.Equal(got, model) {
		p.t.Errorf("the table has %v, want %v", got, model)
	}
	err := errors.Join(s.Write(func(int, int, int) error { return errSlot }), s.Trim(func(int) error { return errSlot }))
	if err != nil {
		p.t.Error("something is left to be written or deleted")
	}
}

// TestTableMatchesMap performs random operations on tables and a map. Writes fail,
// with or without effect, and new processes adopt the entries.
func TestTableMatchesMap(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		failing := true
		p := &slotPlane{
			t: t, entries: map[int][2]int{},
			fails: func() bool { return failing && r.IntN(5) == 0 },
			half:  func() bool { return r.IntN(2) == 0 },
		}
		s, model := &driver.Slots[int, int]{}, map[int]int{}
		for step := range 80 {
			for range r.IntN(5) {
				k, v := r.IntN(8), r.IntN(3)
				switch r.IntN(5) {
				case 0, 1:
					s.Delete(k)
					delete(model, k)
				default:
					s.Set(k, v)
					model[k] = v
				}
			}
			switch r.IntN(12) {
			case 0: // a new process
				s = &driver.Slots[int, int]{}
				for i, e := range p.entries {
					s.Adopt(i, e[0], e[1])
				}
				s.Replace(maps.All(model))
			case 1:
				s.Rewrite()
			}
			if s.Len() != len(model) {
				t.Errorf("length %d, want %d", s.Len(), len(model))
			}
			if err := p.sync(s); err != nil && !errors.Is(err, errSlot) {
				t.Fatal(err)
			}
			if step%8 == 7 {
				failing = false
				if err := p.sync(s); err != nil {
					t.Fatal(err)
				}
				p.agree(s, model)
				failing = true
			}
			if t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
		}
	}
}

// TestWritesAreProportionalToChanges counts the writes. A key that replaces another
// one costs one write.
func TestWritesAreProportionalToChanges(t *testing.T) {
	p := &slotPlane{t: t, entries: map[int][2]int{}, fails: func() bool { return false }}
	s := &driver.Slots[int, int]{}
	expect := func(what string, writes int) {
		t.Helper()
		p.writes = -1 // the size
		if err := p.sync(s); err != nil {
			t.Fatal(err)
		}
		if p.writes != writes {
			t.Errorf("%s: %d writes, want %d", what, p.writes, writes)
		}
	}
	for i := range 100 {
		s.Set(i, 1)
	}
	expect("100 keys", 100)
	expect("nothing", 0)
	s.Set(7, 1)
	expect("the same again", 0)
	s.Set(7, 2)
	expect("another value", 1)
	s.Delete(7)
	s.Set(1000, 1)
	expect("a key in place of another", 1)
	s.Delete(50)
	expect("one key deleted", 2) // the last key moves to its slot, and the last slot is deleted
	s.Delete(98)
	s.Delete(1000)
	expect("two keys deleted", 3) // one of them was the last
	s.Rewrite()
	expect("everything", 97)

	next := &driver.Slots[int, int]{}
	for i, e := range p.entries {
		next.Adopt(i, e[0], e[1])
	}
	next.Replace(s.All())
	s = next
	expect("a new process", 0)
}
