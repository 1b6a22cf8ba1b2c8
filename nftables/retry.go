//go:build linux

package nftables

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
)

// again repeats a read that a transaction of somebody else's interrupted.
func again(read func() error) error {
	var err error
	for range 10 {
		if err = read(); !errors.Is(err, nfnl.ErrInterrupted) {
			break
		}
	}
	return err
}

// ignoreInterrupted returns err unless it says that others committed transactions
// during the reading, every time.
func ignoreInterrupted(err error) error {
	if errors.Is(err, nfnl.ErrInterrupted) {
		return nil
	}
	return err
}

// persist repeats what failed because somebody else changed the same tables
// between reading and writing them.
func persist(f func() error) error {
	var err error
	for range 5 {
		err = f()
		var drift *ruleset.DriftError
		if !errors.As(err, &drift) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return err
}

// ignore returns err unless it is the kernel's error errno.
func ignore(err error, errno unix.Errno) error {
	if errors.Is(err, errno) {
		return nil
	}
	return err
}
