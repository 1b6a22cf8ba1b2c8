package socketlb

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"time"

	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// Check reads all entries of the maps, compares them and the programs with what the backend
// wrote, and follows changes of the node's addresses. It returns a [*dataplane.DriftError] if
// another process altered or deleted something, or if the state of the maps is unknown after
// a failure. Before the first full delta it returns nil. It can also return [os.ErrClosed], ctx's error, or an error of reading. After
// any error except ctx's, [Backend.Apply] requires a full delta.
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

func (b *Backend) check() error {
	drift := func(format string, args ...any) error {
		return &dataplane.DriftError{Backend: "socketlb", Family: b.config.Families[0], What: fmt.Sprintf(format, args...)}
	}
	if !b.known {
		return drift("the state of the maps is unknown: no full delta was applied since the last failure")
	}
	for _, k := range b.hooks {
		if what := k.check(&b.config); what != "" {
			return drift("%s: %s", k.name, what)
		}
	}
	for _, f := range b.maps.files(&b.config) {
		if !b.maps.pinned(filepath.Join(b.config.Dir, f.name), *f.m) {
			return drift("the file of map %s is missing or belongs to another map", f.name)
		}
	}
	frontends, err := readMap[frontendKey, frontendValue](b.maps.frontends)
	if err != nil {
		return err
	}
	if !maps.Equal(frontends, maps.Collect(b.frontends.All())) {
		return drift("map frontends: entries differ from what was written")
	}
	endpoints, err := readMap[slotKey, endpoint](b.maps.endpoints)
	if err != nil {
		return err
	}
	want := map[slotKey]endpoint{}
	for at, e := range b.slots.All() {
		want[keyOfSlot(at)] = e
	}
	if !maps.Equal(endpoints, want) {
		return drift("map endpoints: entries differ from what was written")
	}
	members, err := readMap[memberKey, byte](b.maps.members)
	if err != nil {
		return err
	}
	if !maps.Equal(members, maps.Collect(b.members.All())) {
		return drift("map members: entries differ from what was written")
	}
	addresses, err := readMap[[16]byte, address](b.maps.addresses)
	if err != nil {
		return err
	}
	if !maps.Equal(addresses, b.addresses) {
		return drift("map addresses: entries differ from what was written")
	}
	if err = b.writeAddresses(); errors.Is(err, errBound) {
		err = drift("%v", err)
	}
	return err
}
