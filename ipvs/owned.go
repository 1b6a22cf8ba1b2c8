//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// ownChain is a chain that kube-proxy does not have in any mode.
const ownChain = "KUBE-IPVS-SERVICES"

// Owned reports whether a [Backend] has programmed the network namespace, in any
// family of the configuration. Where it has not, rules and sets of the same names
// are kube-proxy's, which [Cleanup] would remove, too. It fails if that cannot be told.
func Owned(ctx context.Context, c Config) (owned bool, err error) {
	if c, err = c.withDefaults(); err != nil {
		return false, err
	}
	for _, f := range c.Families {
		saved, err := iptables{c.IPTables, f, c.NetNS}.save(ctx)
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("ipvs: %w", err)
		}
		owned = owned || strings.Contains(saved, "\n:"+ownChain+" ")
	}
	return owned, nil
}
