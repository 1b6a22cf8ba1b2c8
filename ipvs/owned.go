//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/go-proxier/proxier/internal/netns"
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
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return false, fmt.Errorf("ipvs: %w", err)
	}
	defer ns.Close()
	for _, f := range c.Families {
		tool, err := findTool(ctx, c, f, ns)
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		var have string
		if err == nil {
			have, err = saved(ctx, tool)
		}
		if err != nil {
			return false, fmt.Errorf("ipvs: %w", err)
		}
		owned = owned || strings.Contains(have, "\n:"+ownChain+" ")
	}
	return owned, nil
}
