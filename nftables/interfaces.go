//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// links returns the index of each network interface by name.
func (b *Backend) links() (map[string]int, error) {
	var links []netlink.Link
	var err error
	for range 10 {
		if links, err = b.route.LinkList(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	out := make(map[string]int, len(links))
	for _, link := range links {
		out[link.Attrs().Name] = link.Attrs().Index
	}
	return out, nil
}

// chooses reports whether the interface of a name is chosen.
func (o *Offload) chooses(name string) bool {
	return name != loopbackInterface && o.Interfaces(name)
}

// SyncInterfaces adds new network interfaces that Offload.Interfaces chooses to the fast path,
// and removes others from it. [Backend.Watch] does the same whenever an interface changes, and
// so does a full delta. So only callers that do not run Watch need SyncInterfaces. Without
// Config.Offload, or before the first full delta, it does nothing. The error is ctx's, wraps
// [os.ErrClosed], or is a [*ruleset.DriftError] if the flowtable is gone. Any other error may
// be temporary.
func (b *Backend) SyncInterfaces(ctx context.Context) error {
	if err := b.lock(ctx); err != nil {
		return err
	}
	defer b.mu.Unlock()
	return b.syncInterfaces()
}

// syncInterfaces makes the flowtables and the sets of interfaces agree with the existing
// interfaces. It tries again if an interface is deleted concurrently.
func (b *Backend) syncInterfaces() error {
	if b.config.Offload == nil || b.tables == nil {
		return nil
	}
	err := persist(func() error {
		links, err := b.links()
		if err != nil {
			return err
		}
		maps.DeleteFunc(links, func(name string, _ int) bool { return !b.config.Offload.chooses(name) })
		w := newWriter(b.name)
		for _, t := range b.tables {
			found, err := b.readFlowtables(b.name, t.family)
			if err != nil {
				return err
			}
			ft, ok := found[fastPath]
			if !ok {
				return drifted(t.family, "flowtable %s is missing", fastPath)
			}
			w.devices("delete interfaces of flowtable "+fastPath, unix.NFT_MSG_DELFLOWTABLE, 0, t.family, missingNames(ft.devices, links))
			w.devices("add interfaces to flowtable "+fastPath, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, t.family, missingNames(links, ft.devices))
			for _, name := range missingNames(t.interfaces, links) {
				w.removes(t.family, setFastPathInterfaces).Add(interfaceName(name), nil, "")
			}
			for _, name := range missingNames(links, t.interfaces) {
				w.adds(t.family, setFastPathInterfaces).Add(interfaceName(name), nil, "")
			}
		}
		if err := w.commit(b.conn); err != nil {
			return err
		}
		for _, t := range b.tables {
			t.interfaces, t.count[setFastPathInterfaces] = links, len(links)
		}
		return nil
	})
	b.staleInterfaces = err != nil
	if err != nil {
		return fmt.Errorf("nftables: cannot update interfaces of the fast path: %w", err)
	}
	return nil
}

// missingNames returns the keys of a that are missing from b, sorted.
func missingNames[A, B any](a map[string]A, b map[string]B) []string {
	var out []string
	for name := range a {
		if _, ok := b[name]; !ok {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// followInterfaces starts a goroutine that calls SyncInterfaces now and whenever an interface
// changes, and calls failed with the errors. stop ends the goroutine. serialized calls failed,
// but never concurrently with the goroutine. Without Config.Offload no goroutine starts.
func (b *Backend) followInterfaces(ctx context.Context, failed func(error)) (serialized func(error), stop func(), err error) {
	if b.config.Offload == nil {
		return failed, func() {}, nil
	}
	var s *nl.NetlinkSocket
	err = b.ns.Do(func() (err error) {
		s, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
		return err
	})
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
			err := b.SyncInterfaces(ctx)
			// ENOENT means that interfaces are deleted faster than they can be listed.
			for attempt := 0; attempt < 10 && errors.Is(err, unix.ENOENT); attempt++ {
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
				err = b.SyncInterfaces(ctx)
			}
			if err != nil && ctx.Err() == nil && !errors.Is(err, os.ErrClosed) {
				report(err)
			}
			if err := b.waitInterfaces(ctx, s); err != nil {
				if ctx.Err() == nil && !errors.Is(err, os.ErrClosed) {
					report(fmt.Errorf("nftables: cannot watch interfaces: %w", err))
				}
				return
			}
		}
	})
	return report, func() { cancel(); s.Close(); done.Wait() }, nil
}

// waitInterfaces returns nil when SyncInterfaces may have something to do.
func (b *Backend) waitInterfaces(ctx context.Context, s *nl.NetlinkSocket) error {
	for {
		messages, from, err := s.Receive()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS): // the socket lost notifications
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case from.Pid != nl.PidKernel:
			continue
		}
		for _, m := range messages {
			header := unix.NlMsghdr(m.Header)
			link, err := netlink.LinkDeserialize(&header, m.Data)
			if err != nil || b.matters(m.Header.Type == unix.RTM_DELLINK, link.Attrs()) {
				return nil
			}
		}
	}
}

// matters reports whether the change of an interface changes the chosen interfaces. Most changes
// are about an interface's state, or SyncInterfaces has seen them.
func (b *Backend) matters(gone bool, link *netlink.LinkAttrs) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tables == nil {
		return false // the next full delta lists all interfaces
	}
	index, known := b.tables[0].interfaces[link.Name]
	if gone {
		return known && index == link.Index
	}
	if b.config.Offload.chooses(link.Name) {
		return !known || index != link.Index
	}
	// The interface may have had another name before.
	for _, index := range b.tables[0].interfaces {
		if index == link.Index {
			return true
		}
	}
	return false
}
