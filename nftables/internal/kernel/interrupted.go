package kernel

import (
	"errors"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// IgnoreInterrupted returns nil if transactions of other processes interrupted every read, and
// err otherwise.
func IgnoreInterrupted(err error) error {
	if errors.Is(err, nfnl.ErrInterrupted) {
		return nil
	}
	return err
}
