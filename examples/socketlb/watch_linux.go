package socketlb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"time"

	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// Check reads all entries of the maps, compares them and the programs with the backend's
// writes, and follows changes of the node's addresses. It returns a [*dataplane.DriftError]
// if another process altered or deleted something, or if the state of the maps is unknown
// after a failure. Before the first full delta it returns nil. It can also return
// [os.ErrClosed], ctx's error, or an error of reading. After any error except ctx's,
// [Backend.Apply] requires a full delta.
func (b *Backend) Check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	if !b.started {
		return nil
	}
	err := b.check()
	if err != nil {
		b.known = false
	}
	return err
}

// Watch calls [Backend.Check] at each interval until ctx is done or the backend is closed, and
// calls drifted with the errors of Check. It returns ctx's error or [os.ErrClosed]. drifted
// should resync the cursor ([ruleset.Cursor.Resync]). See [dataplane.Watch].
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	return dataplane.Watch(ctx, interval, b.Check, drifted)
}

func (b *Backend) drift(format string, args ...any) error {
	return &dataplane.DriftError{Backend: "socketlb", Family: b.config.Families[0], What: fmt.Sprintf(format, args...)}
}

// differs returns an error unless a map has the wanted entries.
func differs[K, V comparable](b *Backend, name string, want map[K]V) error {
	got, err := readMap[K, V](b.maps[name])
	if err == nil && !maps.Equal(got, want) {
		err = b.drift("map %s: entries differ from what was written", name)
	}
	return err
}

func (b *Backend) check() error {
	if !b.known {
		return b.drift("the state of the maps is unknown: no full delta was applied since the last failure")
	}
	for _, k := range b.hooks {
		if err := k.check(&b.config); err != nil {
			return b.drift("%s: %v", k.name, err)
		}
	}
	for name, m := range b.maps {
		if !pinned(filepath.Join(b.config.Dir, name), m) {
			return b.drift("the file of map %s is missing or belongs to another map", name)
		}
	}
	endpoints := map[slotKey]endpoint{}
	for at, e := range b.slots.All() {
		endpoints[keyOfSlot(at)] = e
	}
	if err := cmp.Or(
		differs(b, "frontends", maps.Collect(b.frontends.All())),
		differs(b, "endpoints", endpoints),
		differs(b, "members", maps.Collect(b.members.All())),
		differs(b, "addresses", b.addresses),
	); err != nil {
		return err
	}
	err := b.writeAddresses()
	if errors.Is(err, errBound) {
		err = b.drift("%v", err)
	}
	return err
}
