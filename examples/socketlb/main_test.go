//go:build linux

package socketlb

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/threadcgroup"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// privileged returns an error if this process may not load programs, which needs capabilities
// in the initial user namespace.
var privileged = sync.OnceValue(func() error {
	dir, closeDir, err := TemporaryDir()
	if err != nil {
		return err
	}
	defer closeDir()
	return Probe(context.Background(), Config{Dir: dir})
})

func TestMain(m *testing.M) {
	confine.Roles{"probe": func() error {
		return Probe(context.Background(), Config{Dir: os.Getenv("PROBE_DIR"), Cgroup: os.Getenv("PROBE_CGROUP")})
	}}.Enter()
	if privileged() == nil {
		// No process in the user namespace that conformance.Main creates may load programs.
		os.Setenv(netlab.InsideEnv, "1")
		netlab.Parallel(4) // worlds wait for packets that must not arrive
		code := m.Run()
		if p, err := testCgroup(); err == nil {
			if err := p.Close(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = max(code, 1)
			}
		}
		os.Exit(code)
	}
	conformance.Main(m)
}

// need skips the test without privileges.
func need(tb testing.TB) {
	tb.Helper()
	err := privileged()
	netlab.Need(tb, err == nil, fmt.Sprintf("the right to load BPF programs: %v", err))
	netlab.Require(tb)
}

// node is the cgroup of a world's processes, and the folder of its maps.
type node struct {
	*threadcgroup.Group
	dir string
}

// newNode creates a cgroup, to which single threads of this process are moved.
func newNode(tb testing.TB) *node {
	tb.Helper()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	parent, err := testCgroup()
	must(err)
	dir, closeDir, err := TemporaryDir()
	must(err)
	group, err := parent.New()
	must(err)
	n := &node{group, dir}
	tb.Cleanup(func() {
		if err := errors.Join(Cleanup(context.Background(), n.config()), closeDir(), group.Close()); err != nil {
			tb.Error(err)
		}
	})
	return n
}

// config has room for what a test needs: the kernel allocates the maps in advance.
func (n *node) config() Config {
	return Config{Cgroup: n.Path(), Dir: n.dir, Connections: 1 << 12, Clients: 1 << 10}
}

// testCgroup is this process's cgroup, which contains the cgroups of all nodes.
var testCgroup = sync.OnceValues(func() (*threadcgroup.Parent, error) {
	root, err := RootCgroup()
	if err != nil {
		return nil, err
	}
	return threadcgroup.NewParent(root)
})
