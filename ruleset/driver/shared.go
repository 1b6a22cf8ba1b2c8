package driver

import (
	"errors"
	"iter"

	"github.com/go-proxier/proxier/ruleset/ledger"
	"github.com/go-proxier/proxier/tracker"
)

// shared is a table whose entries several Services use.
type shared[K comparable] struct {
	table  Table[K, struct{}]
	ledger ledger.Ledger[tracker.Key, K]
}

// adopt starts a full delta: it forgets what the table has and reads it.
func (s *shared[K]) adopt() error {
	s.ledger = ledger.Ledger[tracker.Key, K]{}
	if s.table.Put == nil || s.table.Installed == nil {
		return nil
	}
	all, err := s.table.Installed()
	if err != nil {
		return err
	}
	for item := range all {
		s.ledger.Installed(item)
	}
	return nil
}

// had records that the table may have items of a Service, so that they can be released.
func (s *shared[K]) had(k tracker.Key, items iter.Seq[K]) {
	if s.table.Put == nil {
		return
	}
	for item := range items {
		s.ledger.Claim(k, item)
	}
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
func (s *shared[K]) release(k tracker.Key, items iter.Seq[K]) error {
	if s.table.Put == nil {
		return nil
	}
	for item := range items {
		if !s.ledger.Release(k, item) {
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

// sweep deletes the items that no Service uses.
func (s *shared[K]) sweep() error {
	if s.table.Put == nil {
		return nil
	}
	var errs []error
	for item := range s.ledger.Unused() {
		if err := s.table.Delete(item); err != nil {
			errs = append(errs, err)
			continue
		}
		s.ledger.Removed(item)
	}
	return errors.Join(errs...)
}
