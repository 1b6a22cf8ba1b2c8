// Package backendconf has the defaults and checks that the configurations of all
// kernel backends share.
package backendconf

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/bits"
	"slices"
	"syscall"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Families returns the address families to program: a copy of list, or both families if
// list is nil. If list has other values, or a family twice, the error wraps
// [ruleset.ErrConfig].
func Families(list []tracker.Family) ([]tracker.Family, error) {
	if list == nil {
		return []tracker.Family{tracker.IPv4, tracker.IPv6}, nil
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: Families is empty and not nil", ruleset.ErrConfig)
	}
	for i, f := range list {
		if f != tracker.IPv4 && f != tracker.IPv6 || slices.Contains(list[:i], f) {
			return nil, fmt.Errorf("%w: Families %v is not one or both of IPv4 and IPv6", ruleset.ErrConfig, list)
		}
	}
	return slices.Clone(list), nil
}

// Complete sets defaults for the fields that all kernel backends share. The error wraps
// [ruleset.ErrConfig].
func Complete(families *[]tracker.Family, mark *dataplane.MasqueradeMark, log **slog.Logger) error {
	list, err := Families(*families)
	if err != nil {
		return err
	}
	if *mark == 0 {
		*mark = dataplane.DefaultMasqueradeMark
	}
	if bits.OnesCount32(uint32(*mark)) != 1 {
		return fmt.Errorf("%w: masquerade mark %#x does not have exactly one bit", ruleset.ErrConfig, uint32(*mark))
	}
	*families, *log = list, Log(*log)
	return nil
}

// Probe closes the backend that a New returned. It returns New's error or that of Close.
func Probe(b io.Closer, err error) error {
	if err != nil {
		return err
	}
	return b.Close()
}

// Log returns l, or a logger that discards everything if l is nil.
func Log(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}

// Complain logs an error about a Service port, once while it stays the same and at a bounded
// rate.
func Complain(l *complaint.Log, level slog.Level, k tracker.Key, message string, err error) {
	if err == nil {
		l.Write(level, complaint.Port(k.Namespace, k.Name, k.String()), message)
		return
	}
	l.Write(level, complaint.Port(k.Namespace, k.Name, k.String()), message, "error", err)
}

// Temporary reports whether an error is the kernel's that what it needs is short or in use at the
// moment, so that it says nothing about the features of the system.
func Temporary(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) && slices.Contains([]syscall.Errno{
		syscall.ENOMEM, syscall.ENOBUFS, syscall.EAGAIN, syscall.EINTR, syscall.EBUSY, syscall.EEXIST, syscall.EMFILE, syscall.ENFILE,
	}, errno)
}
