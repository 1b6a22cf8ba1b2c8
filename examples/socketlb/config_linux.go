package socketlb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// DefaultDir is the default of Config.Dir.
const DefaultDir = "/sys/fs/bpf/proxier-socketlb"

// Config is the configuration of a [Backend]. The zero value is a node's usual
// configuration.
type Config struct {
	// Cgroup is the folder of the cgroup whose processes are served, including all cgroups
	// below it; "" means the root of the cgroup2 file system. All its processes must be in
	// NetNS or in pods of this node.
	Cgroup string
	// Dir is the folder in a BPF file system (bpffs) that keeps the maps and links for the
	// next process; "" means [DefaultDir]. The backend creates the folder and owns
	// everything in it. Its parent must exist.
	Dir string
	// NetNS is an open file of the node's network namespace; nil means the namespace of the
	// thread that calls [New]. New duplicates the file.
	NetNS *os.File
	// Families are the address families to program; nil means both. Services of another
	// family are ignored.
	Families []tracker.Family
	// NodeOnly leaves the connections of pods to the backend behind. It is for nodes on
	// which pods redirect their own connections by the Service's address, as the sidecars
	// of a service mesh do.
	NodeOnly bool
	// Log receives repairs and Services that cannot be programmed; nil discards them.
	Log *slog.Logger

	// endpoints, connections and clients are sizes of maps. 0 means the constants below; tests set smaller ones.
	endpoints, connections, clients int
}

const (
	maxFrontends = 1 << 16
	maxAddresses = 1 << 14
	// maxEndpoints is the number of slots of all pools of all Services. A pool has a slot for each endpoint, and more for
	// endpoints with weights. A Service that does not fit is left to the backend behind.
	maxEndpoints = 1 << 18
	// maxConnections is the number of concurrent connections that fit into the maps, and of flows of unconnected UDP
	// sockets, each to one address of a Service. Up to 4,096 more connections may be translated. A network namespace may have
	// a sixteenth of the flows, and a socket 8. Further connections and datagrams are left to the backend behind. There are
	// as many ports at an address. The kernel allocates about 200 bytes for each connection in advance.
	maxConnections = 1 << 16
	// maxClients is the number of clients of Services with affinity that are stored. A new client replaces the least recently
	// used one. The kernel allocates about 100 bytes for each client in advance.
	maxClients = 1 << 16
)

// withDefaults returns c with defaults for the fields that are not set, or an error
// that wraps [ruleset.ErrConfig] or is ctx's.
func (c Config) withDefaults(ctx context.Context) (Config, error) {
	if c.Dir == "" {
		c.Dir = DefaultDir
	}
	c.Families = slices.Clone(c.Families)
	if c.Families == nil {
		c.Families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	var err error
	unknown := func(f tracker.Family) bool { return f != tracker.IPv4 && f != tracker.IPv6 }
	if n := len(c.Families); n == 0 || n > 2 || n == 2 && c.Families[0] == c.Families[1] || slices.ContainsFunc(c.Families, unknown) {
		err = fmt.Errorf("%w: Families %v is not one or both of IPv4 and IPv6", ruleset.ErrConfig, c.Families)
	}
	if !filepath.IsAbs(c.Dir) {
		err = errors.Join(err, fmt.Errorf("%w: folder %q is not an absolute path", ruleset.ErrConfig, c.Dir))
	}
	c.endpoints, c.connections, c.clients = cmp.Or(c.endpoints, maxEndpoints), cmp.Or(c.connections, maxConnections), cmp.Or(c.clients, maxClients)
	if err != nil {
		return c, fmt.Errorf("socketlb: %w", err)
	}
	return c, ctx.Err()
}
