//go:build linux

package ipvs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestKernelFollowsServices runs the tests that need a kernel with IPVS, in one machine.
func TestKernelFollowsServices(t *testing.T) {
	if !inMachine(t) {
		return
	}
	t.Run("source hash replaces missing Maglev", testSourceHashReplacesMissingMaglev)
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Cleanup leaves foreign objects", testCleanupLeavesForeignObjects},
		{"only a Backend's rules are owned", testOnlyBackendRulesAreOwned},
		{"Lookup finds virtual servers", testLookupFindsVirtualServers},
		{"connections are counted", testConnectionsAreCounted},
		{"every virtual server has counters", testEveryVirtualServerHasCounters},
		{"every scheduler works", testEverySchedulerWorks},
		{"sysctls and timeouts are set", testSysctlsAndTimeoutsAreSet},
		{"IPv4 works with IPv6 disabled", testIPv4WorksWithIPv6Disabled},
		{"connections outlive their endpoint", testConnectionsOutliveTheirEndpoint},
		{"ended connections hold no port", testEndedConnectionsHoldNoPort},
		{"Watch retries refused NodePorts", testWatchRetriesRefusedNodePorts},
		{"UDP answers arrive while draining", testUDPAnswersArriveWhileDraining},
		{"both iptables accept the rules", testBothIptablesAcceptTheRules},
		{"legacy iptables forwards packets", testLegacyIptablesForwardsPackets},
		{"Maglev passes a draining server", testMaglevPassesADrainingServer},
		{"nodes hash alike", testNodesHashAlike},
		{"source hash keeps clients", testSourceHashKeepsClients},
		{"a new scheduler keeps connections", testNewSchedulerKeepsConnections},
		{"a drain outlives a restart", testDrainOutlivesARestart},
		{"forwarding is read back", testForwardingIsReadBack},
		{"answers go straight to the client", testAnswersGoStraightToTheClient},
		{"operators choose the source", testOperatorsChooseTheSource},
		{"a Renderer writes what a Backend writes", testRendererWrites},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t)
		})
	}
	for name, test := range followTests() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, func(tb testing.TB) node { return hostNode{newHost(tb)} })
		})
	}
}

// testRendererWrites gives the tools what a Renderer's transactions print.
func testRendererWrites(t *testing.T) {
	backend, text := newHost(t), newHost(t)
	rendererWrites(t, hostNode{backend}, hostNode{text}, func(*Renderer) func(*Transaction) error {
		return func(tx *Transaction) error {
			for _, in := range tx.Inputs() {
				args := strings.Fields(in.Program)
				cmd := exec.Command(args[0], args[1:]...)
				var diag bytes.Buffer
				cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in.Text), &diag, &diag
				if err := errors.Join(text.Start(cmd), cmd.Wait()); err != nil || diag.Len() != 0 {
					return fmt.Errorf("%s: %v: %s\n%s", in.Program, err, &diag, in.Text)
				}
			}
			return nil
		}
	})
}

// testCleanupLeavesForeignObjects compares the host before New and after Cleanup.
func testCleanupLeavesForeignObjects(t *testing.T) {
	h := newHost(t)
	state := func() []string {
		out := lines(t, h, "ipvsadm -Sn")
		out = append(out, lines(t, h, "ipset save")...)
		out = append(out, withoutComments(lines(t, h, "iptables-save"))...)
		out = append(out, withoutComments(lines(t, h, "ip6tables-save"))...)
		for _, l := range lines(t, h, "ip -o link") {
			out = append(out, strings.Fields(l)[1])
		}
		return out
	}
	for _, c := range []string{
		"ipvsadm -A -t 203.0.113.9:99 -s lc", "ipvsadm -A -f 77 -s rr", "ipset create mine hash:ip", "ipset add mine 192.0.2.77",
		"iptables -t nat -A POSTROUTING -s 192.0.2.77 -j MASQUERADE", "iptables -t mangle -N KUBE-MARK-MASQ", "ip6tables -A INPUT -p tcp --dport 99 -j DROP",
		"iptables -t nat -A PREROUTING -d 192.0.2.77 -j RETURN", "iptables -t filter -A FORWARD -d 192.0.2.77 -j ACCEPT", "ip6tables -t nat -L", "ip6tables -t mangle -L",
		"iptables -t mangle -A INPUT -d 192.0.2.77 -j ACCEPT",
	} {
		lines(t, h, c)
	}
	before := state()
	if err := Cleanup(context.Background(), Config{NetNS: h.File()}); err != nil {
		t.Errorf("with nothing to remove: %v", err)
	}
	if after := state(); !slices.Equal(before, after) {
		t.Errorf("Cleanup with nothing to remove changed the host:\n%s\nbefore:\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
	r := newRig(t, h, Config{})
	r.set(svc(1, nodePort(30001), externalIPs("198.18.0.1", "2001:db8:e::1"), externalLocal), 1, 1, -1)
	r.set(svc(2, over(v1.ProtocolSCTP), nodePort(30002)), 2, 1, -1)
	r.sync()
	if len(state()) < len(before)+40 {
		t.Error("the backend wrote fewer than 40 objects")
	}
	r.backend.Close()
	if err := Cleanup(context.Background(), r.config); err != nil {
		t.Error(err)
	}
	after := state()
	// Empty tables stay.
	r.same("after Cleanup", missing(after, []string{"*nat", "*mangle", "*filter", "COMMIT"}), missing(before, []string{"*nat", "*mangle", "*filter", "COMMIT"}))
	if err := Cleanup(context.Background(), r.config); err != nil {
		t.Errorf("second Cleanup: %v", err)
	}
}

func testEverySchedulerWorks(t *testing.T) {
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1), 1, -1)
	for _, s := range []Scheduler{
		WeightedRoundRobin, SourceHash, Maglev,
		"lc", "wlc", "lblc", "lblcr", "dh", "sed", "nq", "fo", "ovf", RoundRobin,
	} {
		r.config.Scheduler = s
		r.restart()
		r.sync()
		flags := ""
		switch s {
		case SourceHash:
			flags = " -b sh-fallback"
		case Maglev:
			flags = " -b mh-fallback,mh-port"
		}
		r.has("ipvsadm -Sn", fmt.Sprintf("-A -t 10.96.0.1:80 -s %s%s", s, flags))
		r.hasNot("ipvsadm -Sn", "198.51.100.0")
	}
	testMissingScheduler(t)
	testForeignScheduler(t)
}

// testForeignScheduler uses a scheduler that this package has no name for: the module
// ip_vs_rr under another name.
func testForeignScheduler(t *testing.T) {
	t.Helper()
	const name = "zz"
	module, err := os.ReadFile("/modules/ip_vs_rr.ko")
	if err != nil {
		t.Log("needs the virtual machine: the test adds a kernel module")
		return
	}
	h := newHost(t)
	c := Config{NetNS: h.File(), Scheduler: name, Families: []tracker.Family{tracker.IPv4}}
	if err := Probe(t.Context(), c); !errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), "scheduler zz (module ip_vs_zz) for IPv4 is not supported") {
		t.Errorf("without its module: %v", err)
	}
	// Replace the names of the module and of the scheduler. Neither is part of a longer string.
	for old, now := range map[string]string{"ip_vs_rr\x00": "ip_vs_" + name + "\x00", "\x00rr\x00": "\x00" + name + "\x00"} {
		if !bytes.Contains(module, []byte(old)) {
			t.Fatalf("the module has no %q", old)
		}
		module = bytes.ReplaceAll(module, []byte(old), []byte(now))
	}
	// The kernel rejects a module with a wrong signature, but not one without any
	// (Documentation/admin-guide/module-signing.rst).
	module = bytes.TrimSuffix(module, []byte("~Module signature appended~\n"))
	file := filepath.Join(t.TempDir(), "ip_vs_"+name+".ko")
	must.Do(t, os.WriteFile(file, module, 0o644))
	must.Get(exec.Command("insmod", file).CombinedOutput())(t)
	r := newRig(t, h, c)
	r.set(svc(1), 1, -1)
	r.sync()
	r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s "+name)
}

// testMissingScheduler removes the module of a scheduler that no other test uses.
func testMissingScheduler(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("rmmod", "ip_vs_ovf").CombinedOutput(); err != nil {
		t.Logf("cannot remove a module: %v: %s", err, out)
		return
	}
	h := newHost(t)
	err := Probe(t.Context(), Config{NetNS: h.File(), Scheduler: "ovf"})
	var unsupported *dataplane.UnsupportedError
	if !errors.Is(err, dataplane.ErrUnsupported) || !errors.As(err, &unsupported) || !strings.Contains(err.Error(), "module ip_vs_ovf") {
		t.Errorf("%v", err)
	}
	if err := Probe(t.Context(), Config{NetNS: h.File(), Scheduler: RoundRobin}); err != nil {
		t.Error(err)
	}
	if got := lines(t, h, "ipvsadm -Sn"); len(got) != 0 {
		t.Errorf("Probe left %q", got)
	}
}

func testSysctlsAndTimeoutsAreSet(t *testing.T) {
	h := newHost(t)
	parameter := func(name string) string {
		return strings.Join(lines(t, h, "cat /proc/sys/"+name), " ")
	}
	c := Config{NetNS: h.File(), StrictARP: true, Timeouts: Timeouts{TCP: 100 * time.Second, UDP: 30 * time.Second}}
	lines(t, h, "ipvsadm --set 900 120 300")
	r := newRig(t, h, c)
	if parameter("net/ipv4/vs/conntrack") != "0" {
		t.Error("New set a kernel parameter")
	}
	r.sync()
	for _, s := range parametersOf(t, c) {
		if got := parameter(s.name); got != s.value {
			t.Errorf("%s is %s, want %s", s.name, got, s.value)
		}
	}
	if got := parameter("net/ipv6/conf/all/forwarding"); got != "0" {
		t.Errorf("IPv6 forwarding is %s, want 0: the node would lose routes from router advertisements", got)
	}
	r.has("ipvsadm -l --timeout", "Timeout (tcp tcpfin udp): 100 120 30")
	// The next full delta repairs a parameter that another program changed.
	lines(t, h, "sysctl -w net.ipv4.vs.conntrack=0")
	r.cursor.Resync()
	r.sync()
	if parameter("net/ipv4/vs/conntrack") != "1" {
		t.Error("a kernel parameter was not repaired")
	}
	early := newHost(t)
	c.NetNS = early.File()
	if err := SetSysctls(t.Context(), c); err != nil {
		t.Error(err)
	}
	for _, s := range parametersOf(t, c) {
		if got := strings.Join(lines(t, early, "cat /proc/sys/"+s.name), " "); got != s.value {
			t.Errorf("SetSysctls: %s is %s, want %s", s.name, got, s.value)
		}
	}
	kept := newHost(t)
	r = newRig(t, kept, Config{KeepSysctls: true})
	r.sync()
	if got := lines(t, kept, "cat /proc/sys/net/ipv4/vs/conntrack"); !slices.Equal(got, []string{"0"}) {
		t.Errorf("conntrack is %q with KeepSysctls, want 0", got)
	}
}

// testIPv4WorksWithIPv6Disabled disables IPv6 before New, and while a backend serves both
// families.
func testIPv4WorksWithIPv6Disabled(t *testing.T) {
	h := newHost(t)
	must.Do(t, h.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"))
	for _, families := range [][]tracker.Family{nil, {tracker.IPv6}} {
		if err := Probe(t.Context(), Config{NetNS: h.File(), Families: families}); !errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), "net.ipv6.conf.all.disable_ipv6 is 1") {
			t.Errorf("families %v: %v", families, err)
		}
	}
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1), 1, -1)
	r.sync()
	r.agree()
	// Cleanup of both families works.
	if err := Cleanup(context.Background(), Config{NetNS: h.File()}); err != nil {
		t.Error(err)
	}
	// A backend that served IPv6 before still serves IPv4.
	later := newHost(t)
	r = newRig(t, later, Config{})
	r.set(svc(1), 1, -1)
	r.sync()
	must.Do(t, later.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"))
	r.set(svc(2), 2, -2)
	r.cursor.Resync()
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(context.Background()); !errors.As(err, &partial) || len(partial.Failed) != 2 {
		t.Errorf("%v, want a PartialError for two IPv6 Services", err)
	} else {
		for k := range partial.Failed {
			if k.Family != tracker.IPv6 {
				t.Errorf("%v failed", k)
			}
		}
	}
	r.has("ipvsadm -Sn", "-a -t 10.96.0.2:80 -r 10.245.0.2:8080 -m -w 1")
}

// testConnectionsOutliveTheirEndpoint uses a connection after its endpoint was removed and after
// its Service was deleted.
func testConnectionsOutliveTheirEndpoint(t *testing.T) {
	h := newHost(t)
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}})
	// The endpoints are the node's own addresses.
	for _, a := range []string{"10.244.1.1/32", "10.244.1.2/32"} {
		must.Do(t, h.AddAddr("eth0", netip.MustParsePrefix(a)))
		h.ServeTCP(t, strings.TrimSuffix(a, "/32")+":8080", func(c net.Conn) {
			fmt.Fprintln(c, c.LocalAddr())
			_, _ = io.Copy(c, c)
		})
	}
	tend := func(after time.Duration) {
		t.Helper()
		must.Do(t, r.backend.tend(context.Background(), time.Now().Add(after)))
	}
	type conn struct {
		io.ReadWriteCloser
		lines  *bufio.Reader
		server string
	}
	dial := func(wait time.Duration) (*conn, error) {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		c, err := h.Dial(ctx, "tcp", "192.0.2.1:0", "10.96.0.1:80")
		if err != nil {
			return nil, err
		}
		lines := bufio.NewReader(c)
		server, err := lines.ReadString('\n')
		return &conn{c, lines, strings.TrimSpace(server)}, err
	}
	echo := func(c *conn) error {
		if _, err := fmt.Fprintln(c, "hello"); err != nil {
			return err
		}
		got, err := c.lines.ReadString('\n')
		if err == nil && got != "hello\n" {
			err = fmt.Errorf("got %q", got)
		}
		return err
	}
	r.set(svc(1), 1, 1)
	r.sync()
	first, err := dial(testtime.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	// Replace its endpoint.
	r.set(svc(1), 1, 2)
	r.sync()
	tend(time.Hour)
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 0", "-a -t 10.96.0.1:80 -r 10.244.1.2:8080 -m -w 1")
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost with its endpoint: %v", err)
	}
	for range 4 {
		c, err := dial(testtime.Timeout)
		if err != nil {
			t.Fatal(err)
		}
		if c.server != "10.244.1.2:8080" {
			t.Errorf("the draining %s gets new connections", c.server)
		}
		c.Close()
	}
	// Add the endpoint again, remove it, and restart.
	r.set(svc(1), 1, 1, 2)
	r.sync()
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 1")
	r.set(svc(1), 1, 2)
	r.sync()
	r.restart()
	r.sync()
	tend(time.Hour)
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost in a restart: %v", err)
	}
	// Remove all endpoints.
	r.set(svc(1), 1)
	r.sync()
	tend(time.Hour)
	r.has("ipset save KUBE-NO-ENDPOINTS", "add KUBE-NO-ENDPOINTS 10.96.0.1,tcp:80")
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost with the last endpoint: %v", err)
	}
	if c, err := dial(2 * time.Second); err == nil {
		t.Errorf("%s answered for a Service without endpoints", c.server)
	}
	// Delete the Service.
	r.remove(1)
	r.sync()
	tend(retireLimit - time.Minute)
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost with its Service: %v", err)
	}
	if c, err := dial(2 * time.Second); err == nil {
		t.Errorf("%s answered for a deleted Service", c.server)
	}
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
	r.restart()
	r.sync()
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost in a restart after its Service was deleted: %v", err)
	}
	// Create the Service again.
	r.set(svc(1), 1, 1, 2)
	r.sync()
	r.agree()
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost when its Service was created again: %v", err)
	}
	r.hasNot("ipset save", "NO-LOCAL-ENDPOINTS 10")
	// A limit ends the connection.
	r.remove(1)
	r.sync()
	r.backend.config.DrainLimit = time.Minute
	tend(time.Minute / 2)
	r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s rr")
	tend(time.Hour)
	if got := r.run("ipvsadm -Sn"); len(got) != 0 {
		t.Errorf("after the limit: %q", got)
	}
	r.hasNot("ipset save", "add ")
	r.hasNot("ip -o addr show dev kube-ipvs0", "10.96")
}

// checkHidden makes iptables-save unable to print a table. Each jump must still be found.
func checkHidden(t *testing.T, h *netlab.Host, k kernel, f tracker.Family, tables []table) error {
	family := map[tracker.Family]string{tracker.IPv4: "ip", tracker.IPv6: "ip6"}[f]
	for _, tab := range tables {
		foreign := family + " " + tab.name + " foreign"
		if _, err := h.Run(t, "nft", "add chain "+foreign+"; add rule "+foreign+" ct state new accept"); err != nil {
			return err
		}
		hidden, err := k.savedRules(t.Context(), f)
		if err != nil {
			return err
		}
		if input := restoreAll(tables, hidden); strings.Contains(input, "-I ") {
			return fmt.Errorf("jumps that exist are inserted again beside a rule of table %s:\n%s", tab.name, input)
		}
		for _, tab := range tables {
			for _, c := range tab.chains {
				if _, ok := hidden[tab.name][c.name]; !ok {
					return fmt.Errorf("chain %s is hidden", c.name)
				}
			}
		}
		if _, err := h.Run(t, "nft", "flush chain "+foreign+"; delete chain "+foreign); err != nil {
			return err
		}
	}
	return nil
}

// testEndedConnectionsHoldNoPort deletes a Service with a connection that one side has closed. Once the
// other has, too, a process of the node gets the NodePort, which IPVS would refuse for two minutes.
func testEndedConnectionsHoldNoPort(t *testing.T) {
	h := newHost(t)
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}})
	must.Do(t, h.AddAddr("eth0", netip.MustParsePrefix("10.244.1.1/32")))
	answer := make(chan bool)
	h.ServeTCP(t, "10.244.1.1:8080", func(c net.Conn) {
		_, _ = io.Copy(io.Discard, c) // until the client closes
		<-answer
		_, _ = io.WriteString(c, "answer")
	})
	dial := func() (net.Conn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
		defer cancel()
		return h.Dial(ctx, "tcp", "192.0.2.1:0", "192.0.2.1:30001")
	}
	r.set(svc(1, nodePort(30001)), 1, 1)
	r.sync()
	c, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	must.Do(t, c.(*net.TCPConn).CloseWrite())
	r.remove(1)
	r.sync()
	retire := func() (n int) {
		t.Helper()
		r.backend.states[0].nextLook = time.Time{}
		n, err := r.backend.Retire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := retire(); n != 1 {
		t.Errorf("%d real servers drain while one side of the connection is open", n)
	}
	close(answer)
	if got, err := io.ReadAll(c); err != nil || string(got) != "answer" {
		t.Errorf("got %q, %v", got, err)
	}
	c.Close()
	for deadline := time.Now().Add(testtime.Timeout); retire() != 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the port is held although the connection has ended")
		}
	}
	h.ServeTCP(t, "192.0.2.1:30001", func(net.Conn) {})
	if c, err = dial(); err != nil {
		t.Errorf("the port is not free: %v", err)
	} else {
		c.Close()
	}
}

// testBothIptablesAcceptTheRules restores the golden rules twice with both variants of iptables.
func testBothIptablesAcceptTheRules(t *testing.T) {
	for _, variant := range []iptables.Flavor{iptables.NFT, iptables.Legacy} {
		for name, g := range goldenRules() {
			h := newHost(t)
			golden, err := os.ReadFile("testdata/" + name)
			if err != nil {
				t.Fatal(err)
			}
			config, err := Config{NetNS: h.File(), IPTables: variant, Families: []tracker.Family{g.family}}.withDefaults()
			if err != nil {
				t.Fatal(err)
			}
			ctx := t.Context()
			k, err := open(ctx, config, toServe)
			if err != nil {
				t.Fatal(err)
			}
			for id := range setCount {
				must.Do(t, k.createSet(id, g.family))
			}
			err = func() error {
				if err := k.restoreRules(ctx, g.family, string(golden)); err != nil {
					return err
				}
				first, err := k.savedRules(ctx, g.family)
				if err != nil {
					return err
				}
				if err := k.restoreRules(ctx, g.family, restoreAll(g.tables(), first)); err != nil {
					return err
				}
				second, err := k.savedRules(ctx, g.family)
				if err != nil {
					return err
				}
				if variant == iptables.NFT {
					if err := checkHidden(t, h, k, g.family, g.tables()); err != nil {
						return err
					}
				}
				own := ownRules(g.tables(), first)
				if again := ownRules(g.tables(), second); own != again {
					return fmt.Errorf("after the second restore:\n%s\nafter the first:\n%s", again, own)
				}
				rules := strings.Count(string(golden), "\n-A ") + strings.Count(string(golden), "\n-I ")
				if got := strings.Count(own, "\n-A "); got != rules {
					return fmt.Errorf("%d rules, want %d:\n%s", got, rules, own)
				}
				if err := k.restoreRules(ctx, g.family, removeAll(g.tables(), second)); err != nil {
					return err
				}
				third, err := k.savedRules(ctx, g.family)
				if err == nil && strings.Contains(fmt.Sprint(third), "KUBE") {
					err = fmt.Errorf("after the removal:\n%s", third)
				}
				return err
			}()
			k.close()
			if err != nil {
				t.Errorf("%s, %s: %v", variant, name, err)
			}
		}
	}
}

func testLegacyIptablesForwardsPackets(t *testing.T) {
	w := conformance.NewWorld(t, conformance.Options{New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families, IPTables: iptables.Legacy})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
	churn(t, w, func() {
		w.Cursor.Resync()
		w.Sync()
	})
}

// testMaglevPassesADrainingServer connects with Maglev while servers drain.
func testMaglevPassesADrainingServer(t *testing.T) {
	w := conformance.NewWorld(t, conformance.Options{New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families, Scheduler: Maglev})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
	pods := w.Pods()
	churn(t, w, func() {
		for i := range 10 {
			ep := slice(1, v1.ProtocolTCP)
			for _, p := range pods[i%3 : i%3+2] {
				s := slice(1, v1.ProtocolTCP, 1).Endpoints[0]
				s.Addresses = []string{p.Addr(tracker.IPv4).String()}
				s.NodeName = &p.Node
				ep.Endpoints = append(ep.Endpoints, s)
			}
			w.Tracker.SetSlice(ep)
			w.Sync()
			time.Sleep(50 * time.Millisecond)
		}
	})
}

// churn connects to a Service with the first pods as endpoints while f runs.
func churn(t *testing.T, w *conformance.World, f func()) {
	t.Helper()
	ep := slice(1, v1.ProtocolTCP, 1, 2)
	for i := range ep.Endpoints {
		p := w.Pods()[i]
		ep.Endpoints[i].Addresses, ep.Endpoints[i].NodeName = []string{p.Addr(tracker.IPv4).String()}, &p.Node
	}
	w.Tracker.SetService(svc(1))
	w.Tracker.SetSlice(ep)
	w.Sync()
	c := w.Churn([]conformance.Target{{Addr: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: v1.ProtocolTCP}}, f)
	if c.Opened < 4 {
		t.Errorf("only %d connections", c.Opened)
	}
	for _, err := range c.Failures {
		t.Error(err)
	}
}

// parametersOf returns the kernel parameters that SetSysctls sets.
func parametersOf(t *testing.T, c Config) []parameter {
	t.Helper()
	c, err := c.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return c.parameters((*system)(nil).release())
}
