//go:build linux

package iptables

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// linuxSystems lists the flavors of Linux.
var linuxSystems = []system{{NFT, false}, {Legacy, false}}

// onLinux returns a flavor of Linux.
func onLinux(flavor Flavor) system { return system{flavor, false} }

// flavors runs a test for each flavor that is installed.
func flavors(t *testing.T, f func(t *testing.T, flavor Flavor)) {
	for _, s := range linuxSystems {
		t.Run(s.String(), func(t *testing.T) {
			need(t, s)
			needSecond(t, s)
			f(t, s.Flavor)
		})
	}
}

// needSecond skips a test with iptables-legacy that runs with iptables-nft, too, unless every test should
// run. In memory it runs in both flavors.
func needSecond(tb testing.TB, s system) {
	tb.Helper()
	if _, err := exec.LookPath("iptables-nft-restore"); err == nil && s == onLinux(Legacy) {
		testtime.NeedComplete(tb)
	}
}

// need skips a test whose programs are not installed.
func need(tb testing.TB, s system) {
	tb.Helper()
	if !s.memory {
		needFlavor(tb, s.Flavor)
	}
}

// lacks skips a test, as netlab.Need does.
func lacks(tb testing.TB, what string) {
	tb.Helper()
	netlab.Need(tb, false, what)
}

// linuxPrograms returns the programs of iptables-nft, or nil without namespaces or programs.
func linuxPrograms(t *testing.T, f tracker.Family) programs {
	c := must.Get(Config{Flavor: NFT}.withDefaults())(t)
	if os.Getenv(netlab.InsideEnv) == "" {
		return nil
	}
	k := must.Get(openKernel(c))(t)
	p, err := k.Programs(t.Context(), f)
	if err != nil {
		return nil
	}
	return p
}

func needFlavor(tb testing.TB, flavor Flavor) {
	tb.Helper()
	_, err4 := exec.LookPath("iptables-" + string(flavor) + "-restore")
	_, err6 := exec.LookPath("ip6tables-" + string(flavor) + "-restore")
	netlab.Need(tb, err4 == nil && err6 == nil, "iptables-"+string(flavor)+"-restore and ip6tables-"+string(flavor)+"-restore")
}

// testConfig returns a configuration for a test.
func testConfig(tb testing.TB, flavor Flavor) Config {
	tb.Helper()
	needFlavor(tb, flavor)
	// Only root may open the usual lock file.
	return Config{Flavor: flavor, LockFile: filepath.Join(tb.TempDir(), "lock")}
}

// linuxNode is a node with a kernel of Linux.
type linuxNode struct {
	watch
	host     *netlab.Host
	flavor   Flavor
	lockFile string
	tb       testing.TB
	dir      string        // of the scripts, or ""
	limit    time.Duration // of a script
}

func newLinuxNode(tb testing.TB, flavor Flavor, c *Config) testNode {
	n := &linuxNode{host: netlab.NewHost(tb), flavor: flavor, tb: tb, limit: time.Minute}
	*c = testConfig(tb, flavor)
	c.NetNS, n.lockFile = n.host.File(), c.LockFile
	return n
}

// host returns the host of a rig on Linux.
func (r *rig) host() *netlab.Host { return r.node.(*linuxNode).host }

// hide adds rules with nft that iptables-save cannot print, or, in table ip6 filter, cannot parse.
func (n *linuxNode) hide() (show func()) {
	run := func(format string) {
		n.tb.Helper()
		for _, rule := range []string{
			"ip nat: ip saddr 10.9.0.0/16 counter snat to 172.18.0.2", "ip filter: ct state new accept",
			"ip6 nat: limit rate 3 bytes/second accept", "ip6 filter: icmpv6 type 1 meta mark set 4",
		} {
			table, rule, _ := strings.Cut(rule, ": ")
			must.Get(n.host.Run(n.tb, "nft", strings.NewReplacer("TABLE", table, "RULE", rule).Replace(format)))(n.tb)
		}
	}
	run("add chain TABLE foreign; add rule TABLE foreign RULE")
	return func() { run("flush chain TABLE foreign; delete chain TABLE foreign") }
}

func (n *linuxNode) open(c Config) (kernel, error) {
	k, err := openKernel(c)
	if err != nil {
		return nil, err
	}
	return watchedLinux{k.(*linux), n}, nil
}

// watchedLinux is a kernel of Linux with watched programs.
type watchedLinux struct {
	*linux
	node *linuxNode
}

func (w watchedLinux) Programs(ctx context.Context, f tracker.Family) (programs, error) {
	p, err := w.linux.Programs(ctx, f)
	if err != nil {
		return nil, err
	}
	return watchedPrograms{p, w, f}, nil
}

type watchedPrograms struct {
	programs
	kernel watchedLinux
	family tracker.Family
}

func (p watchedPrograms) Restore(ctx context.Context, input []byte, options ...string) error {
	n := p.kernel.node
	how, err := n.restore(p.family, input)
	if err != nil {
		return err
	}
	if how == "" {
		return p.programs.Restore(ctx, input, options...)
	}
	c := p.kernel.tools(p.family)
	c.Restore = filepath.Join(n.dir, programName(p.family)+"-"+c.Flavor+"-restore")
	script, err := findPrograms(ctx, c)
	if err != nil {
		return err
	}
	return tool{script.(tool).WithTimeout(n.limit)}.Restore(ctx, input, options...)
}

func (n *linuxNode) command(f tracker.Family, suffix string, args ...string) (string, error) {
	return n.host.Output("env", append([]string{"XTABLES_LOCKFILE=" + n.lockFile, programName(f) + "-" + string(n.flavor) + suffix}, args...)...)
}

func (n *linuxNode) sysctl(name string) string {
	value, err := n.host.Output("cat", "/proc/sys/"+name)
	if err != nil {
		n.tb.Error(err)
	}
	return strings.TrimSpace(value)
}

func (n *linuxNode) setSysctl(name, value string) error { return n.host.Sysctl(name, value) }

func (n *linuxNode) timeout(d time.Duration) { n.limit = d }

func (n *linuxNode) set(how, what string) {
	n.watch.set(how, what)
	if n.dir == "" && (how == "hang" || how == "late") {
		n.dir = hangingPrograms(n.tb, n.flavor)
	}
	for _, f := range []string{"hang", "late"} {
		os.Remove(filepath.Join(n.dir, f))
		if how == f {
			must.Do(n.tb, os.WriteFile(filepath.Join(n.dir, f), nil, 0o644))
		}
	}
}

// hangingPrograms returns a folder with scripts in place of iptables-restore. If the folder has a file "hang", they hang,
// and if it has a file "late", they hang after their work.
func hangingPrograms(tb testing.TB, flavor Flavor) string {
	dir := tb.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		restore := must.Get(exec.LookPath(family + "-" + string(flavor) + "-restore"))(tb)
		script := fmt.Sprintf(`#!/bin/sh
case $1 in --version) exec %[2]s "$@";; esac
cd %[1]s
if [ -e hang ]; then : > hung.$$; exec sleep 60; fi
if [ -e late ]; then %[2]s "$@"; exec sleep 60; fi
exec %[2]s "$@"
`, dir, restore)
		// A process forked while the file is open for writing has it open, too, until it
		// runs its program. Until then the script cannot be run (ETXTBSY).
		syscall.ForkLock.RLock()
		err := os.WriteFile(filepath.Join(dir, filepath.Base(restore)), []byte(script), 0o755)
		syscall.ForkLock.RUnlock()
		if err != nil {
			tb.Fatal(err)
		}
	}
	return dir
}

// newForWorld returns a function that opens backends of a flavor for worlds.
func newForWorld(flavor Flavor) func(testing.TB, conformance.Env) ruleset.Backend {
	return func(tb testing.TB, env conformance.Env) ruleset.Backend {
		c := testConfig(tb, flavor)
		c.NetNS, c.Families = env.NetNS, env.Families
		b := must.Get(New(context.Background(), c))(tb)
		tb.Cleanup(func() { b.Close() })
		return b
	}
}

// TestConformance runs the suite that all backends must pass. Most of its time goes to the programs.
// Both flavors get the same rules, so iptables-legacy is left out unless tests are complete, and
// IPv6 with it unless they are thorough.
func TestConformance(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		o := conformance.Options{New: newForWorld(flavor), Skip: maps.Clone(skips)}
		if !testtime.Complete() {
			o.Skip[conformance.TrafficAtOnce] = "each reading of counters starts two programs"
		}
		if flavor == Legacy {
			testtime.NeedComplete(t)
		}
		if flavor == Legacy && !testtime.Thorough() {
			o.Families = []tracker.Family{tracker.IPv4}
		}
		conformance.Run(t, o)
	})
}

// podTargets is the cluster IP and the NodePort of Service 50, whose endpoints are pods of a
// world.
var podTargets = []conformance.Target{
	{Addr: netip.MustParseAddrPort("10.96.0.50:80"), Protocol: v1.ProtocolTCP},
	{Addr: netip.MustParseAddrPort("192.0.2.1:30050"), Protocol: v1.ProtocolTCP},
}

// podSlice returns the EndpointSlice of Service 50 with n of the pods.
func podSlice(pods []string, n int, rng *rand.Rand) *discovery.EndpointSlice {
	es := slice(50, tracker.IPv4)
	backendtest.AddPods(es, pods, n, rng)
	return es
}

// setPods gives Service 50 n of the world's pods as endpoints.
func setPods(w *conformance.World, n int, rng *rand.Rand) {
	w.Tracker.SetSlice(podSlice(backendtest.Pods(w), n, rng))
}

// TestRandomWorlds sends packets through random worlds, and compares the tables after each
// change with the tables of a cold start.
func TestRandomWorlds(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		worlds := 25
		if !testtime.Thorough() {
			worlds = 1
		}
		first := *backendtest.Seed
		if flavor == Legacy { // other worlds
			first += uint64(worlds)
		}
		conformance.RunRandom(t, conformance.Options{New: newForWorld(flavor), Skip: skips}, conformance.Random{
			First: first, Worlds: worlds, For: max(0, *backendtest.Soak/2),
			Dump: func(tb testing.TB, env conformance.Env, b ruleset.Backend) string { return dump(tb, b.(*Backend)) },
		})
	})
}
