package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
)

// refreshInterfaces adds new network interfaces that Offload.Interfaces chooses to the fast path, and removes others
// from it, as a full delta does. Without Config.Offload, or before the first full delta, it does nothing. The error
// is ctx's, wraps [os.ErrClosed], or is a [*dataplane.DriftError] if the flowtable is gone. Any other error may be
// temporary.
func (b *Backend) refreshInterfaces(ctx context.Context) error {
	if err := b.lock(ctx); err != nil {
		return err
	}
	defer b.mu.Unlock()
	return b.syncInterfaces()
}

// syncInterfaces makes the flowtables and the sets of interfaces agree with the existing interfaces.
func (b *Backend) syncInterfaces() error {
	if b.config.Offload == nil || b.tables == nil {
		return nil
	}
	err := persist(func() error {
		links, err := b.conn.Links()
		if err != nil {
			return err
		}
		maps.DeleteFunc(links, func(name string, _ int) bool { return !b.config.Offload.chooses(name) })
		tx := &model.Tx{}
		for _, t := range b.tables.List {
			found, err := b.conn.Flowtables(b.name, t.Family)
			if err != nil {
				return err
			}
			ft, ok := found[layout.FastPath]
			if !ok {
				return drifted(t.Family, "flowtable %s is missing", layout.FastPath)
			}
			tx.Object(model.Object{Kind: model.DeleteDevices, Family: t.Family, Names: model.Missing(ft.Devices, links)})
			tx.Object(model.Object{Kind: model.AddDevices, Family: t.Family, Names: model.Missing(links, ft.Devices)})
			t.Intervals.SetInterfaces(links, tx)
		}
		if err := b.commit(b.name, tx); err != nil {
			return err
		}
		for _, t := range b.tables.List {
			t.KeepInterfaces(links)
		}
		return nil
	})
	b.staleInterfaces = err != nil
	if err != nil {
		return fmt.Errorf("nftables: cannot update interfaces of the fast path: %w", err)
	}
	return nil
}

// followInterfaces starts a goroutine that calls refreshInterfaces now and whenever an interface changes, and calls
// failed with the errors. stop ends the goroutine. serialized calls failed, but never concurrently with the
// goroutine. Without Config.Offload no goroutine starts.
func (b *Backend) followInterfaces(ctx context.Context, failed func(error)) (serialized func(error), stop func(), err error) {
	if b.config.Offload == nil {
		return failed, func() {}, nil
	}
	events, err := b.conn.WatchLinks()
	if errors.Is(err, os.ErrClosed) {
		return nil, nil, errClosed
	}
	if err != nil {
		return nil, nil, fmt.Errorf("nftables: cannot watch interfaces: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var mu sync.Mutex
	report := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		failed(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			err := b.refreshInterfaces(ctx)
			// ENOENT means that interfaces are deleted faster than they can be listed.
			for attempt := 0; attempt < 10 && errors.Is(err, syscall.ENOENT); attempt++ {
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
				err = b.refreshInterfaces(ctx)
			}
			if err != nil && ctx.Err() == nil && !errors.Is(err, os.ErrClosed) {
				report(err)
			}
			if err := b.waitInterfaces(ctx, events); err != nil {
				if ctx.Err() == nil && !errors.Is(err, os.ErrClosed) {
					report(fmt.Errorf("nftables: cannot watch interfaces: %w", err))
				}
				return
			}
		}
	})
	return report, func() { cancel(); events.Close(); done.Wait() }, nil
}

// waitInterfaces returns nil when refreshInterfaces may have something to do.
func (b *Backend) waitInterfaces(ctx context.Context, events linkEvents) error {
	for {
		changes, err := events.Next()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return err
		case len(changes) == 0 || slices.ContainsFunc(changes, b.matters):
			return nil
		}
	}
}

// matters reports whether the change of an interface changes the chosen interfaces. Most changes do not.
func (b *Backend) matters(link linkChange) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tables == nil {
		return false // the next full delta lists all interfaces
	}
	index, known := b.tables.List[0].Intervals.Interfaces()[link.name]
	if link.gone {
		return known && index == link.index
	}
	if b.config.Offload.chooses(link.name) {
		return !known || index != link.index
	}
	// The interface may have had another name before.
	for _, index := range b.tables.List[0].Intervals.Interfaces() {
		if index == link.index {
			return true
		}
	}
	return false
}

// compareFlowtables compares the table's flowtables with the model. A device that is gone or was renamed may be
// missing.
func (b *Backend) compareFlowtables(t *model.Table) error {
	found, err := b.conn.Flowtables(b.name, t.Family)
	if err != nil {
		return err
	}
	ft, ok := found[layout.FastPath]
	if b.config.Offload != nil {
		if !ok || !ft.Sound {
			return drifted(t.Family, "flowtable %s is missing or has other attributes", layout.FastPath)
		}
		delete(found, layout.FastPath)
	}
	for name := range found {
		return drifted(t.Family, "unexpected flowtable %s", name)
	}
	missing, unexpected := model.Missing(t.Intervals.Interfaces(), ft.Devices), model.Missing(ft.Devices, t.Intervals.Interfaces())
	if t.Intervals.Interfaces() == nil || len(missing)+len(unexpected) == 0 {
		return nil
	}
	links, err := b.conn.Links()
	if err != nil {
		return err
	}
	for _, name := range missing {
		if links[name] == t.Intervals.Interfaces()[name] {
			return drifted(t.Family, "flowtable %s has no interface %s", layout.FastPath, name)
		}
	}
	known := slices.Collect(maps.Values(t.Intervals.Interfaces()))
	for _, name := range unexpected {
		if index, ok := links[name]; ok && !slices.Contains(known, index) {
			return drifted(t.Family, "flowtable %s has unexpected interface %s", layout.FastPath, name)
		}
	}
	return nil
}
