package driver

import (
	"errors"
	"iter"

	"github.com/go-proxier/proxier/tracker"
)

// shared is a table whose entries several Services use.
type shared[K comparable] struct {
	table  Table[K, struct{}]
	ledger Ledger[tracker.Key, K]
	// early is as in records.
	early map[K]struct{}
}

// adopt starts a full delta: it reads the table. If that is not possible, everything that
// Services use must be put again.
func (s *shared[K]) adopt() error {
	if s.table.Put == nil {
		return nil
	}
	var found []K
	if s.table.Installed != nil {
		all, err := s.table.Installed()
		if err != nil {
			return err
		}
		s.early = keep(s.early)
		for item := range all {
			if found = append(found, item); !s.ledger.Has(item) && s.ledger.Users(item) == 0 {
				s.early[item] = struct{}{}
			}
		}
		for item := range s.ledger.Unused() {
			s.ledger.Removed(item)
		}
	}
	for k := range s.ledger.Owners() {
		for item := range s.ledger.Items(k) {
			s.ledger.Removed(item)
		}
	}
	for _, item := range found {
		s.ledger.Installed(item)
	}
	return nil
}

// keep returns early, and an empty map instead of nil.
func keep[K comparable](early map[K]struct{}) map[K]struct{} {
	if early == nil {
		return map[K]struct{}{}
	}
	return early
}

// claim puts what a Service needs and the table does not have.
func (s *shared[K]) claim(k tracker.Key, items iter.Seq[K]) error {
	if s.table.Put == nil {
		return nil
	}
	for item := range items {
		if !s.ledger.Claim(k, item) {
			continue
		}
		if err := s.table.Put(item, struct{}{}); err != nil {
			return err
		}
		s.ledger.Installed(item)
	}
	return nil
}

// release deletes items that a Service does not use any more, unless another Service does.
// If old is set, it leaves early items, which sweep deletes later.
func (s *shared[K]) release(k tracker.Key, items iter.Seq[K], old bool) error {
	if s.table.Put == nil {
		return nil
	}
	for item := range items {
		if !s.ledger.Release(k, item) || s.isEarly(item, old) {
			continue
		}
		if err := s.table.Delete(item); err != nil {
			s.ledger.Claim(k, item) // the retry releases it again
			return err
		}
		s.ledger.Removed(item)
	}
	return nil
}

func (s *shared[K]) isEarly(item K, old bool) bool {
	_, early := s.early[item]
	return early && old
}

// disown records that a Service uses no item any more.
func (s *shared[K]) disown(k tracker.Key) {
	for item := range s.ledger.Items(k) {
		s.ledger.Release(k, item)
	}
}

// except yields the items of a Service that are not in wanted.
func (s *shared[K]) except(k tracker.Key, wanted iter.Seq[K]) iter.Seq[K] {
	return func(yield func(K) bool) {
		keep := make(map[K]bool)
		for item := range wanted {
			keep[item] = true
		}
		for item := range s.ledger.Items(k) {
			if !keep[item] && !yield(item) {
				return
			}
		}
	}
}

// sweep deletes the items that no Service uses. If old is set, it leaves early items.
func (s *shared[K]) sweep(old bool) error {
	if s.table.Put == nil {
		return nil
	}
	var errs []error
	for item := range s.ledger.Unused() {
		if s.isEarly(item, old) {
			continue
		}
		if err := s.table.Delete(item); err != nil {
			errs = append(errs, err)
			continue
		}
		s.ledger.Removed(item)
	}
	return errors.Join(errs...)
}
