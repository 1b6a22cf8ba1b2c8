//go:build linux

package nftables

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

var kills = flag.Int("kills", 0, "kill `n` agents in TestKilledAgentsLoseNoConnection; 0 means 20, or 40 in the long form")

// busyWorld returns a world with the busy Service in it, and its backend.
func busyWorld(t *testing.T) (w *conformance.World, s busy, b *Backend) {
	t.Helper()
	t.Helper()
	w = conformance.NewWorld(t, conformance.Options{New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b = newForWorld(tb, env).(*Backend)
		return b
	}})
	s = busyIn(w)
	w.Tracker.SetService(s.service())
	s.hand(w.Tracker, rand.New(rand.NewPCG(1, 3)))
	w.Sync()
	return w, s, b
}

// takenOver has a new backend take over and compares its tables with the ruleset.
func takenOver(t *testing.T, w *conformance.World) {
	t.Helper()
	r := &rig{TB: t, tracker: w.Tracker, engine: w.Engine}
	var err error
	if r.backend, err = open(context.Background(), Config{NetNS: w.Env.NetNS}, withoutGrace); err != nil {
		t.Fatal(err)
	}
	defer r.backend.Close()
	r.cursor = w.Engine.Attach("next", r.backend)
	defer r.cursor.Detach()
	r.sync()
	r.verify()
}

// TestKilledAgentsLoseNoConnection kills agents at random points of their work, and makes
// connections to the Service whose endpoints they change. Every second agent sends only small
// transactions, and so replaces tables by staging tables.
func TestKilledAgentsLoseNoConnection(t *testing.T) {
	t.Parallel()
	times := *kills
	if times == 0 {
		times = 20
		if testtime.Thorough() {
			times = 40
		}
	}
	w, s, _ := busyWorld(t)
	spec := must.Get(json.Marshal(s))(t)
	rng := rand.New(rand.NewPCG(9, 9))
	backendtest.Unharmed(t, w, s.targets(), func() {
		start := func(i int) *exec.Cmd {
			agent := exec.Command("/proc/self/exe")
			agent.Env = append(os.Environ(), agentEnv+"="+string(spec), smallEnv+"="+strconv.Itoa(i%2))
			agent.Stderr = os.Stderr
			return agent
		}
		backendtest.KillAgents(t, w, times, start, func(bool) time.Duration { return time.Duration(rng.IntN(40)) * time.Millisecond })
	})
	takenOver(t, w)
}

// smallEnv, set to 1, makes the agent send only small transactions.
const smallEnv = "PROXIER_TEST_SMALL"

// TestNodePortFollowsNodeAddress adds and removes an address of the node. NodePorts must answer
// there immediately, and connections to other addresses must not fail.
func TestNodePortFollowsNodeAddress(t *testing.T) {
	t.Parallel()
	w, s, b := busyWorld(t)
	extra := netip.MustParseAddr("192.0.2.77")
	there := []conformance.Target{{Addr: netip.AddrPortFrom(extra, 30050), Protocol: v1.ProtocolTCP}}
	set := func(change func(netlink.Link, *netlink.Addr) error) {
		t.Helper()
		if err := w.Do(func() error {
			link, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(extra.String() + "/32")
			if err != nil {
				return err
			}
			return change(link, a)
		}); err != nil {
			t.Fatal(err)
		}
	}
	backendtest.Unharmed(t, w, s.targets(), func() {
		for range 3 {
			set(netlink.AddrAdd)
			backendtest.Unharmed(t, w, there, func() {})
			set(netlink.AddrDel)
			w.Cursor.Resync()
			w.Sync()
			if err := b.Check(t.Context()); err != nil {
				t.Errorf("Check returned %v", err)
			}
		}
	})
	if c := w.Churn(there, func() {}); len(c.Failures) == 0 {
		t.Error("the address still answers")
	}
}

// TestBackendRecoversFromSocketFaults runs the faults in a process of their own, and makes
// connections to the Service that the process serves.
func TestBackendRecoversFromSocketFaults(t *testing.T) {
	t.Parallel()
	w, s, _ := busyWorld(t)
	spec := must.Get(json.Marshal(s))(t)
	few := uint64(64)
	size := uint64(0)
	cmd := confine.Command("faults", confine.Limits{Capabilities: []int{unix.CAP_NET_ADMIN}, Files: &few, FileSize: &size})
	cmd.Env = append(cmd.Env, agentEnv+"="+string(spec))
	backendtest.Unharmed(t, w, s.targets(), func() {
		if err := w.Do(cmd.Start); err != nil {
			t.Error(err)
			return
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	takenOver(t, w)
}

// faults runs a backend without free file descriptors, with signals that interrupt system calls,
// with a receive buffer that is too small, and with a socket that another part of the process
// closes.
func faults() error {
	ctx := context.Background()
	var s busy
	if err := json.Unmarshal([]byte(os.Getenv(agentEnv)), &s); err != nil {
		return err
	}
	b, err := New(ctx, Config{})
	if err != nil {
		return err
	}
	p, err := newAgent(b)
	if err != nil {
		return err
	}
	fd, err := netfilterSocket()
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(1, 1))
	p.tracker.SetService(s.service())
	change := func() error {
		s.hand(p.tracker, rng)
		for i := range 20 {
			p.tracker.SetService(svc(i))
			p.tracker.SetSlice(epSlice(i, tracker.IPv4, rng.Perm(30)[:3+rng.IntN(10)]...))
		}
		return p.cursor.Sync(ctx)
	}
	// recovered verifies the tables after a fault.
	recovered := func() error {
		if err := p.cursor.Sync(ctx); err != nil {
			return err
		}
		if err := b.Check(ctx); err != nil {
			return err
		}
		for _, sv := range p.engine.Snapshot().Ports {
			want := len(sv.Selection.Cluster)
			found, err := lookUp(ctx, Config{}, netip.AddrPortFrom(sv.Spec.ClusterIP, sv.Spec.Port), sv.Key.Protocol)
			if err != nil || len(found.Endpoints) != want {
				return fmt.Errorf("%v: %+v, %w, want %d endpoints", sv.Key, found, err, want)
			}
		}
		return nil
	}
	if err := change(); err != nil {
		return err
	}
	if err := recovered(); err != nil {
		return err
	}
	for _, fault := range []struct {
		name    string
		do      func() (undo func() error, err error)
		want    []error // errors that changes may return; nil: none
		changes int
		certain bool // at least one change fails
	}{
		{"no free file descriptor", func() (func() error, error) {
			var files []*os.File
			for {
				f, err := os.Open("/dev/null")
				if err != nil {
					break
				}
				files = append(files, f)
			}
			return func() error {
				for _, f := range files {
					f.Close()
				}
				return nil
			}, nil
		}, nil, 5, false},
		{"signals", func() (func() error, error) {
			// With a timeout, the kernel does not restart the system call.
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
				return nil, err
			}
			stop, err := backendtest.Signals(100)
			return func() error {
				return errors.Join(stop(), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{}))
			}, err
		}, nil, 100, false},
		{"answers larger than the buffer", func() (func() error, error) {
			size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
			if err != nil {
				return nil, err
			}
			// The kernel's notifications of changes go to the same buffer.
			if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES); err != nil {
				return nil, err
			}
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil {
				return nil, err
			}
			return func() error {
				return errors.Join(unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_DROP_MEMBERSHIP, unix.NFNLGRP_NFTABLES),
					unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size/2))
			}, nil
		}, []error{unix.ENOBUFS}, 3, true},
	} {
		undo, err := fault.do()
		if err != nil {
			return fmt.Errorf("%s: %w", fault.name, err)
		}
		var failed error
		for range fault.changes {
			failed = errors.Join(failed, change())
		}
		if err := undo(); err != nil {
			return fmt.Errorf("%s: undo: %w", fault.name, err)
		}
		if failed != nil && !slices.ContainsFunc(fault.want, func(want error) bool { return errors.Is(failed, want) }) {
			return fmt.Errorf("%s: %w, want %v", fault.name, failed, fault.want)
		}
		if failed == nil && fault.certain {
			return fmt.Errorf("%s: no change failed, want %v", fault.name, fault.want)
		}
		if err := recovered(); err != nil {
			return fmt.Errorf("after %s: %w", fault.name, err)
		}
	}
	return nil
}

// netfilterSocket returns the process's only netlink socket to netfilter.
func netfilterSocket() (int, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1, err
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			return -1, err
		}
		domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		protocol, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if domain == unix.AF_NETLINK && protocol == unix.NETLINK_NETFILTER {
			return fd, nil
		}
	}
	return -1, errors.New("no netfilter socket is open")
}
