package driver

import (
	"fmt"
	"iter"

	"github.com/go-proxier/proxier/ruleset"
)

// Numbered is a table whose keys are numbers, such as the groups of a switch. Each value contains a name, and the
// table numbers the names. The numbers survive a restart if Installed yields the entries. Like a Table, it is not
// safe for concurrent use.
type Numbered[N comparable, V any] struct {
	Table[uint32, V]
	// Low and High are the lowest and the highest number.
	Low, High uint32
	// Name returns the name in a value.
	Name func(V) N

	ids *IDs[N]
	err error
}

// Want requests an entry for the Service of the current call of [Plane].Want, and returns its number. If no number is
// left, it returns 0, and the Service fails.
func (n *Numbered[N, V]) Want(v V) uint32 {
	id, err := n.ids.Get(n.Name(v))
	if err != nil {
		n.err = err
		return 0
	}
	n.Table.Want(id, v)
	return id
}

// Named returns the name that has a number. The bool is false if none has it.
func (n *Numbered[N, V]) Named(id uint32) (N, bool) { return n.ids.Key(id) }

func (n *Numbered[N, V]) complete() (err error) {
	if n.ids, err = NewIDs[N](n.Low, n.High); err != nil || n.Name == nil {
		return fmt.Errorf("%w: Numbered needs a range and Name", ruleset.ErrConfig)
	}
	if installed := n.Installed; installed != nil {
		n.Installed = func(d *ruleset.Delta) (iter.Seq2[uint32, V], error) {
			all, err := installed(d)
			return func(yield func(uint32, V) bool) {
				for id, v := range all {
					if n.ids.Adopt(n.Name(v), id) != nil {
						n.ids.Reserve(id) // a second entry of the name
					}
					if !yield(id, v) {
						return
					}
				}
			}, err
		}
	}
	n.gone = func(id uint32) {
		if k, ok := n.ids.Key(id); ok {
			n.ids.Release(k)
		}
		n.ids.Unreserve(id)
	}
	return n.Table.complete()
}

func (n *Numbered[N, V]) end(owner int) (err error) {
	err, n.err = n.err, nil
	_ = n.Table.end(owner)
	return err
}
