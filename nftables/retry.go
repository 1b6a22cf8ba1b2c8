//go:build linux

package nftables

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
)

// again repeats a read while transactions of other processes interrupt it, at most ten times.
func again(read func() error) (err error) {
	for range 10 {
		if err = read(); !errors.Is(err, nfnl.ErrInterrupted) {
			break
		}
	}
	return err
}

// ignoreInterrupted returns nil if transactions of other processes interrupted every read, and
// err otherwise.
func ignoreInterrupted(err error) error {
	if errors.Is(err, nfnl.ErrInterrupted) {
		return nil
	}
	return err
}

// persist repeats f, at most five times, if it fails because another process changed the same
// tables between reading and writing them.
func persist(f func() error) (err error) {
	for range 5 {
		err = f()
		var drift *ruleset.DriftError
		if !errors.As(err, &drift) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return err
}
