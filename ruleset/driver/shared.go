package driver

import (
	"iter"

	"github.com/go-proxier/proxier/tracker"
)

// shared is a table whose entries several Services use.
type shared[K comparable, V any] struct {
	records[K, V]
	users Ledger[tracker.Key, K]
}

// claim puts what a Service needs and the table does not have.
func (s *shared[K, V]) claim(k tracker.Key, items iter.Seq2[K, V]) error {
	if !s.exists() {
		return nil
	}
	for item, v := range items {
		s.users.Claim(k, item)
		s.set(item, v)
	}
	return s.write()
}

// release deletes items that a Service does not use any more, unless another Service does.
// If old is set, it leaves early items, which sweep deletes later.
func (s *shared[K, V]) release(k tracker.Key, items iter.Seq[K], old bool) error {
	if !s.exists() {
		return nil
	}
	for item := range items {
		if s.users.Release(k, item) {
			s.users.Removed(item)
			if !s.isEarly(item, old) {
				s.drop(item)
			}
		}
	}
	gone := s.gone
	err := s.erase()
	if err != nil {
		for _, item := range gone {
			if _, ok := s.have[item]; ok {
				s.users.Claim(k, item) // the retry releases it again
			}
		}
	}
	return err
}

func (s *shared[K, V]) isEarly(item K, old bool) bool {
	_, early := s.early[item]
	return early && old
}

// disown records that a Service does not use items any more.
func (s *shared[K, V]) disown(k tracker.Key, items iter.Seq[K]) {
	for item := range items {
		if s.users.Release(k, item) {
			s.users.Removed(item)
		}
	}
}

// except yields the items of a Service that are not in wanted.
func (s *shared[K, V]) except(k tracker.Key, wanted iter.Seq2[K, V]) iter.Seq[K] {
	return func(yield func(K) bool) {
		keep := make(map[K]bool)
		for item := range wanted {
			keep[item] = true
		}
		for item := range s.users.Items(k) {
			if !keep[item] && !yield(item) {
				return
			}
		}
	}
}

// sweep deletes the items that no Service uses. If old is set, it leaves early items.
func (s *shared[K, V]) sweep(old bool) error {
	for item := range s.have {
		if s.users.Users(item) == 0 && !s.isEarly(item, old) {
			s.drop(item)
		}
	}
	return s.erase()
}
