package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/go-proxier/proxier/conntrack"
)

// backends are the backends that program the kernel. Both have sockets.
type backends struct {
	plane dataplane
	// cleaner deletes stale UDP flows. It is nil if the system has no connection tracking.
	cleaner *conntrack.Cleaner
}

func (b *backends) close() error {
	if b.cleaner == nil {
		return b.plane.Close()
	}
	return errors.Join(b.plane.Close(), b.cleaner.Close())
}

// kernelSockets holds the current backends, and replaces them after a method of one of
// them returned [os.ErrClosed] because another part of the process closed a socket. Its
// methods are safe for concurrent use.
type kernelSockets struct {
	openPlane   func(context.Context) (dataplane, error)
	openCleaner func() (*conntrack.Cleaner, error)
	log         *slog.Logger

	mu      sync.Mutex
	current *backends
}

// open opens the first backends.
func (k *kernelSockets) open(ctx context.Context) error {
	plane, err := k.openPlane(ctx)
	if err != nil {
		return err
	}
	cleaner, err := k.openCleaner()
	if err != nil {
		k.log.Warn("cannot delete stale UDP flows", "error", err)
		cleaner = nil
	}
	k.current = &backends{plane, cleaner}
	return nil
}

// get returns the current backends.
func (k *kernelSockets) get() *backends {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.current
}

// replace closes old and opens new backends, unless old is no longer current. If that
// fails, old stays current, and the caller calls replace again later.
//
// It replaces all sockets because the kernel reuses file descriptors: the number of a
// socket that was closed may soon belong to another socket.
func (k *kernelSockets) replace(ctx context.Context, old *backends) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current != old {
		return nil
	}
	_ = old.close() // fails because a socket is closed already
	next := &backends{}
	var err error
	if next.plane, err = k.openPlane(ctx); err != nil {
		return fmt.Errorf("cannot reopen the data plane: %w", err)
	}
	if old.cleaner != nil {
		if next.cleaner, err = k.openCleaner(); err != nil {
			next.plane.Close()
			return err
		}
	}
	k.current = next
	k.log.Warn("reopened all netlink sockets: another part of the process closed one")
	return nil
}

// Close closes the current backends.
func (k *kernelSockets) Close() error { return k.get().close() }
