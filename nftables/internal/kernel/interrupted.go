package kernel

import (
	"errors"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Again repeats a read while transactions of other processes interrupt it, at most ten times.
func Again(read func() error) (err error) {
	for range 10 {
		if err = read(); !errors.Is(err, nfnl.ErrInterrupted) {
			break
		}
	}
	return err
}

// IgnoreInterrupted returns nil if transactions of other processes interrupted every read, and
// err otherwise.
func IgnoreInterrupted(err error) error {
	if errors.Is(err, nfnl.ErrInterrupted) {
		return nil
	}
	return err
}
