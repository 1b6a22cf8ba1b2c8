package iptables

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestInvalidPacketsAreDropped checks that packets that connection tracking considers invalid
// are dropped, unless nf_conntrack_tcp_be_liberal is set.
func TestInvalidPacketsAreDropped(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4)
		for _, liberal := range []string{"0", "1"} {
			must.Do(t, r.node.setSysctl("net/netfilter/nf_conntrack_tcp_be_liberal", liberal))
			r.start()
			r.sync()
			drops := slices.ContainsFunc(r.kernel(tracker.IPv4)["filter "+chainForward], func(rule string) bool {
				return strings.Contains(rule, "--ctstate INVALID") && strings.HasSuffix(rule, "-j DROP")
			})
			if drops != (liberal == "0") {
				t.Errorf("be_liberal %s: dropped %v", liberal, drops)
			}
		}
	}, NFT)
}

// TestRouteLocalnetFollowsConfig checks that the backend sets route_localnet if NodePorts answer
// at loopback addresses, and only then.
func TestRouteLocalnetFollowsConfig(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		for _, on := range []bool{false, true} {
			r := newRig(t, flavor, func(c *Config) { c.LocalhostNodePorts = on })
			r.sync()
			if got := r.node.sysctl(routeLocalnet); (got == "1") != on {
				t.Errorf("LocalhostNodePorts %v: route_localnet is %s", on, got)
			}
		}
	}, NFT)
}

// TestRouteLocalnetIsSetBack turns NodePorts at loopback addresses on and off, by SetSysctls and by
// a Backend. The sysctl must be set back only if it was 0 before, and the guard of the loopback
// range must exist for as long as it is set.
func TestRouteLocalnetIsSetBack(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		for _, before := range []string{"0", "1"} {
			for what, apply := range map[string]func(*rig) error{
				"SetSysctls": (*rig).setSysctls,
				"Backend":    func(r *rig) error { r.start(); r.sync(); return nil },
			} {
				r := newRig(t, flavor, onlyIPv4)
				must.Do(t, r.node.setSysctl(routeLocalnet, before))
				state := func() (value string, guarded bool) {
					return r.node.sysctl(routeLocalnet), slices.Contains(r.kernel(tracker.IPv4)["filter INPUT"], iptext.Jump(chainLocalnet))
				}
				for _, on := range []bool{true, false, true} {
					r.config.LocalhostNodePorts = on
					must.Do(t, apply(r))
					want := before
					if on {
						want = "1"
					}
					if got, guarded := state(); got != want || guarded != (want == "1") {
						t.Errorf("%s, was %s, on %v: route_localnet is %s, guarded %v", what, before, on, got, guarded)
					}
				}
				must.Do(t, r.cleanup())
				if got, guarded := state(); got != before || guarded != (before == "1") {
					t.Errorf("%s, was %s, after Cleanup: route_localnet is %s, guarded %v", what, before, got, guarded)
				}
			}
		}
	}, NFT)
}

func TestProbeLeavesNothing(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		before := save(r)
		if err := r.probe(); err != nil {
			t.Error(err)
		}
		r.node.set("refuse", "--probability")
		err := r.probe()
		r.node.set("", "")
		var unsupported *dataplane.UnsupportedError
		var command *CommandError
		if !errors.As(err, &unsupported) || unsupported.Backend != "iptables" || unsupported.Family != tracker.IPv4 || !errors.As(err, &command) {
			t.Errorf("without a match that Services need: %v, want an UnsupportedError and a CommandError", err)
		}
		if after := save(r); after != before {
			t.Errorf("after Probe\n%s\nbefore\n%s", after, before)
		}
	})
}
