package driver

// records is a table and the entries that it has.
type records[K comparable, V any] struct {
	table Table[K, V]
	equal func(a, b V) bool
	have  map[K]record[V]
	// early holds the keys of entries that adopt found and that were not in have. It is nil
	// once nothing that adopt found is left except what Services need.
	early map[K]struct{}
}

// record describes an entry.
type record[V any] struct {
	value V
	// known means that the entry has the value. After a failed write it is not set.
	known bool
	// exists means that the entry was written or found since the last adopt.
	exists bool
	// found means that adopt found the entry and that it may still refer to what it referred to
	// then, which is not known.
	found bool
}

// adopt starts a full delta: it reads the table. If that is not possible, the values of the
// entries become unknown.
func (t *records[K, V]) adopt() error {
	if t.table.Put == nil {
		return nil
	}
	if t.table.Installed == nil {
		for k := range t.have {
			t.have[k] = record[V]{}
		}
		return nil
	}
	all, err := t.table.Installed()
	if err != nil {
		return err
	}
	before := t.have
	t.have, t.early = map[K]record[V]{}, keep(t.early)
	for k, v := range all {
		old, ok := before[k]
		if !ok {
			t.early[k] = struct{}{}
		}
		t.have[k] = record[V]{value: v, known: true, exists: true, found: !ok || old.found}
	}
	return nil
}

// put puts an entry, unless the table has it.
func (t *records[K, V]) put(k K, v V) error {
	old := t.have[k]
	if old.known && t.equal(old.value, v) {
		return nil
	}
	if t.have == nil {
		t.have = map[K]record[V]{}
	}
	t.have[k] = record[V]{exists: old.exists, found: old.found}
	if err := t.table.Put(k, v); err != nil {
		return err
	}
	t.have[k] = record[V]{value: v, known: true, exists: true, found: old.found}
	return nil
}

// confirm records that an entry refers only to what its value says.
func (t *records[K, V]) confirm(k K) {
	if r := t.have[k]; r.found {
		r.found = false
		t.have[k] = r
	}
}

// delete deletes an entry, if the table may have it.
func (t *records[K, V]) delete(k K) error {
	old, ok := t.have[k]
	if !ok {
		return nil
	}
	t.have[k] = record[V]{found: old.found}
	if err := t.table.Delete(k); err != nil {
		return err
	}
	delete(t.have, k)
	return nil
}

// anyFound reports whether an entry is left that adopt found and that was not confirmed. If adopt
// found nothing new, the time is constant.
func (t *records[K, V]) anyFound() bool {
	if t.early == nil {
		return false
	}
	for _, r := range t.have {
		if r.found {
			return true
		}
	}
	return false
}
