package ipvs

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// newHost returns a host with two addresses.
func newHost(tb testing.TB) *netlab.Host {
	tb.Helper()
	lab, hosts := netlab.NewHosts(tb, "node", "peer")
	lab.Link(hosts["node"], "eth0", hosts["peer"], "eth0")
	hosts["node"].Addrs("eth0", "192.0.2.1/24", "2001:db8:1::1/64")
	return hosts["node"]
}

// connections passes lists of IPVS connections to seen until it returns nil. The kernel writes
// such a list page by page and counts from the beginning of a table that all namespaces share.
// If connections come and go, a list can lack a connection or have it twice.
func (r *rig) connections(command string, seen func([]string) error) {
	r.tb.Helper()
	for deadline := time.Now().Add(testtime.Timeout); ; {
		err := seen(r.run(command))
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			r.tb.Fatal(err)
		}
	}
}

func lines(tb testing.TB, h *netlab.Host, command string) []string {
	tb.Helper()
	args := strings.Fields(command)
	out := must.Get(h.Run(tb, args[0], args[1:]...))(tb)
	var list []string
	for l := range strings.Lines(out) {
		list = append(list, strings.Join(strings.Fields(l), " "))
	}
	return list
}

// systemOf returns the kernel that a Backend uses.
func systemOf(b *Backend) *system {
	k := b.kernel
	if c, ok := k.(*counter); ok {
		k = c.kernel
	}
	return k.(writes).kernel.(*system)
}

// hostNode is a host of netlab as a node.
type hostNode struct{ *netlab.Host }

func (n hostNode) open(tb testing.TB, c Config) (*Backend, error) {
	c.NetNS = n.File()
	return New(tb.Context(), c)
}

func (n hostNode) lines(tb testing.TB, command string) []string {
	tb.Helper()
	return lines(tb, n.Host, command)
}

// limit replaces the set by one with the same elements.
func (n hostNode) limit(tb testing.TB, set string, most int) {
	tb.Helper()
	script := fmt.Sprintf(`ipset save %[1]s | sed -e 's/ %[1]s / other /' -e 's/maxelem [0-9]*/maxelem %[2]d/' | ipset restore && ipset swap other %[1]s && ipset destroy other`, set, most)
	if out, err := n.Output("sh", "-c", script); err != nil {
		tb.Fatalf("limit set %s: %v: %s", set, err, out)
	}
}

// newRig starts a backend on the host.
func newRig(tb testing.TB, h *netlab.Host, c Config) *rig {
	tb.Helper()
	c.NetNS = h.File()
	return newRigOn(tb, hostNode{h}, c)
}

// host returns the rig's host.
func (r *rig) host() *netlab.Host { return r.node.(hostNode).Host }

func TestMain(m *testing.M) {
	confine.Roles{
		"everything":        func() error { return everything(iptables.NFT) },
		"everything legacy": func() error { return everything(iptables.Legacy) },
		"churn":             changeEndpoints,
		"faults":            faults,
		"sysctl":            readOnlySysctls,
	}.Enter()
	os.Exit(m.Run())
}

// needed lists the capabilities that a Backend needs.
var needed = []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}

// agent is a pipeline in a separate process.
type agent struct {
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
}

func newAgent(c Config) (*agent, error) {
	b, err := New(context.Background(), c)
	if err != nil {
		return nil, err
	}
	p, err := backendtest.NewPipeline(tracker.Config{Node: tracker.NodeInfo{Name: "node"}}, ruleset.Config{})
	if err != nil {
		return nil, err
	}
	return &agent{p.Tracker, p.Engine, p.Engine.Attach("ipvs", b), b}, nil
}

// inMachine reports whether the running kernel has IPVS. If not, it runs the test in a virtual
// machine that has it, beside the other tests that call inMachine. It skips the test unless all
// tests must run.
func inMachine(t *testing.T) bool {
	t.Helper()
	testtime.NeedComplete(t)
	t.Parallel()
	return vm.Inside(t, vm.IPVS)
}
