package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestLockedTablesStayAsTheyAre holds the xtables lock for longer than the backend waits.
func TestLockedTablesStayAsTheyAre(t *testing.T) {
	needFlavor(t, Legacy)
	t.Parallel()
	r := newRig(t, onLinux(Legacy))
	r.set(0, []int{1})
	r.sync()
	lock, err := os.OpenFile(r.config.LockFile, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	r.setEndpoints(0, 1, 2)
	if err := r.cursor.Sync(context.Background()); !errors.Is(err, ErrLocked) || errors.Is(err, ruleset.ErrNeedFull) {
		t.Fatalf("%v, want ErrLocked", err)
	}
	if err := r.backend.Check(context.Background()); !errors.Is(err, ErrLocked) {
		t.Errorf("Check: %v, want ErrLocked", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	r.sync()
	r.verify()
}

// TestLargestServiceFitsIntoMessages applies a Service with many endpoints, sources and frontends, and the longest
// name, beside others. Without CAP_NET_ADMIN in the initial user namespace, a message to the kernel has 416 KiB.
func TestLargestServiceFitsIntoMessages(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		r := newRig(t, onLinux(flavor), onlyIPv4)
		large := func(n int) func(*v1.Service) {
			return func(s *v1.Service) {
				loadBalancer(s)
				affinity(60)(s)
				s.Spec.Ports[0].Name = strings.Repeat("p", 63)
				s.Spec.LoadBalancerSourceRanges = nil
				for i := range n {
					s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("20.%d.%d.0/24", i>>8, i&255))
					if i < n/4 {
						s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("21.0.%d.%d", i>>8, i&255))
					}
				}
			}
		}
		r.set(0, []int{1})
		r.sync()
		for _, endpoints := range [][]int{upTo(3000), nil, upTo(2000)} { // nil: the sources are in the table filter, too
			r.set(1, endpoints, large(2000))
			r.set(2, []int{1 + len(endpoints)})
			r.sync()
			r.verify()
		}
		r.start()
		r.sync()
		r.verify()
	})
}

// TestConcurrentWritersLoseNoRule runs other programs that change their own chains in the same
// tables and insert jumps before ours. Neither these programs nor the backend may lose a rule.
func TestConcurrentWritersLoseNoRule(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		r := newRig(t, onLinux(flavor), onlyIPv4)
		r.everyKind()
		r.sync()
		const writers, rules = 3, 12
		// Each program writes its rules one by one, and deletes every other rule again.
		var wait sync.WaitGroup
		for n := range writers {
			wait.Go(func() {
				tab := []string{"nat", "filter"}[n%2]
				name := fmt.Sprint("OTHER-", n)
				run := func(args ...string) {
					if out, err := r.try(tracker.IPv4, "", append([]string{"-w", "60", "-t", tab}, args...)...); err != nil {
						t.Errorf("writer %d: %v: %v: %s", n, args, err, out)
					}
				}
				run("-N", name)
				run("-I", "OUTPUT", "1", "-d", fmt.Sprint("203.0.113.", n+200), "-j", name)
				for i := range rules {
					source := fmt.Sprintf("192.0.2.%d/32", i)
					run("-A", name, "-s", source, "-j", "RETURN")
					if i%2 == 1 {
						run("-D", name, "-s", source, "-j", "RETURN")
					}
				}
			})
		}
		done := make(chan struct{})
		go func() { wait.Wait(); close(done) }()
		rng := rand.New(rand.NewPCG(8, 8))
		syncs := 0
		for running := true; running || syncs < 5; syncs++ {
			select {
			case <-done:
				running = false
			default:
			}
			r.set(syncs%10, rng.Perm(40)[:1+rng.IntN(5)], nodePort(30100+int32(syncs%10)))
			if syncs%5 == 4 {
				r.cursor.Resync()
			}
			// If another writer makes a change fail, the backend tries it again immediately or in the
			// next sync.
			if err := r.cursor.Sync(context.Background()); err != nil {
				t.Logf("sync %d: %v", syncs, err)
			}
		}
		r.sync()
		got := r.kernel(tracker.IPv4)
		for n := range writers {
			tab, name := []string{"nat", "filter"}[n%2], fmt.Sprint("OTHER-", n)
			var want []string
			for i := 0; i < rules; i += 2 {
				want = append(want, fmt.Sprintf("-s 192.0.2.%d/32 -j RETURN", i))
			}
			if !slices.Equal(got[tab+" "+name], want) {
				t.Errorf("writer %d: rules are %v, want %v", n, got[tab+" "+name], want)
			}
			hooked := slices.ContainsFunc(got[tab+" OUTPUT"], func(rule string) bool { return strings.HasSuffix(rule, "-j "+name) })
			if !hooked {
				t.Errorf("writer %d: its jump is gone: %v", n, got[tab+" OUTPUT"])
			}
		}
		// Without the other programs' rules, the tables must equal the ruleset.
		for n := range writers {
			tab, name := []string{"nat", "filter"}[n%2], fmt.Sprint("OTHER-", n)
			r.command(tracker.IPv4, "", "-t", tab, "-D", "OUTPUT", "-d", fmt.Sprint("203.0.113.", n+200), "-j", name)
			r.command(tracker.IPv4, "", "-t", tab, "-F", name)
			r.command(tracker.IPv4, "", "-t", tab, "-X", name)
		}
		r.verify()
		t.Logf("%d syncs", syncs)
	})
}

// TestDepthOfTreesIsBounded applies Services whose frontends differ in each bit of address and port: nf_tables
// refuses more than 15 chains that lead to each other. One of the Services has groups of endpoints and of sources.
func TestDepthOfTreesIsBounded(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		r := newRig(t, onLinux(flavor))
		deep := func(s *v1.Service) {
			loadBalancer(s)
			var ips []string
			for bit := range 32 {
				ips = append(ips, netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, 0x14400000^1<<bit))).String())
			}
			for bit := range 128 {
				a := netip.MustParseAddr("2001:db8:5555:5555:5555:5555:5555:5555").As16()
				a[bit/8] ^= 1 << (bit % 8)
				ips = append(ips, netip.AddrFrom16(a).String())
			}
			s.Spec.ExternalIPs = ips
			s.Spec.Ports = nil
			for bit := range 16 {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", bit), Port: 0x5550 ^ 1<<bit, Protocol: v1.ProtocolTCP})
			}
			for low := range int32(16) {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("q", low), Port: 0x5540 + low, Protocol: v1.ProtocolTCP})
			}
		}
		r.set(1, upTo(1100), deep, affinity(60), func(s *v1.Service) {
			s.Spec.Ports[len(s.Spec.Ports)-1].Name = "p" // which the endpoints have
			for i := range 300 {
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("20.%d.%d.0/24", i>>8, i&255))
			}
		})
		r.sync()
		r.verify()
	})
}
