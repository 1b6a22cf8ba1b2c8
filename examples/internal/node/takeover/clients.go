//go:build linux

package takeover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Clients holds the clients that kube-proxy remembers for endpoints of Services with client
// affinity.
type Clients struct {
	// byName holds the clients by the name that kube-proxy gives to an endpoint's memory.
	byName map[string][]netip.Addr
}

// ReadClients reads what kube-proxy remembers in its modes nftables and iptables in the network
// namespace that ns is an open file of. It returns what it could read, with the errors of the rest.
func ReadClients(ctx context.Context, ns *os.File) (*Clients, error) {
	c := &Clients{byName: map[string][]netip.Addr{}}
	return c, errors.Join(c.readSets(ctx, ns), netns.In(ns, c.readRecent))
}

// Of returns the clients of an endpoint of a Service port. Their timeouts begin again, so the time since
// the last connection of each is 0. The result is the caller's.
func (c *Clients) Of(k tracker.Key, endpoint netip.AddrPort) map[netip.Addr]time.Duration {
	out := map[netip.Addr]time.Duration{}
	for _, name := range []string{setName(k, endpoint), iptables.EndpointChain(k, endpoint)} {
		for _, addr := range c.byName[name] {
			out[addr] = 0
		}
	}
	return out
}

// affinityPrefix begins the names of kube-proxy's sets of clients. Eight digits of a hash and
// a hyphen follow, and then what setName returns.
const (
	affinityPrefix = "affinity-"
	hashLength     = 9
)

// WriteRecent writes the clients that kube-proxy's nftables mode remembers for the endpoints of s
// to the lists of xt_recent that package iptables uses, in the network namespace that ns is an open
// file of. The rules of s must be in effect. Clients that have not connected within the affinity
// timeout are left out; the timeout of the others begins again. WriteRecent continues after an error.
func (c *Clients) WriteRecent(ns *os.File, s *ruleset.Port) error {
	if s.Spec.Affinity == 0 {
		return nil
	}
	return netns.In(ns, func() (err error) {
		for _, ep := range s.Selection.Reachable {
			for _, addr := range c.byName[setName(s.Key, ep.Addr)] {
				// The kernel takes one client from each open file.
				err = errors.Join(err, os.WriteFile(recentDir+"/"+iptables.EndpointChain(s.Key, ep.Addr), []byte("+"+addr.String()+"\n"), 0o644))
			}
		}
		return err
	})
}

// setName returns the end of the name of the set of an endpoint's clients in kube-proxy's
// nftables mode, as in affinity-7TCSBJI4-default/web/tcp/http__10.1.0.2/8080.
func setName(k tracker.Key, endpoint netip.AddrPort) string {
	return fmt.Sprintf("%s/%s/%s/%s__%s/%d", k.Namespace, k.Name, strings.ToLower(string(k.Protocol)), k.Port,
		strings.ReplaceAll(endpoint.Addr().String(), ":", "."), endpoint.Port())
}

// readSets reads the sets of kube-proxy's nftables mode.
func (c *Clients) readSets(ctx context.Context, ns *os.File) error {
	conn, err := nft.Dial(ns, sendBuffer)
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, family := range families {
		note := func(e error) {
			if !errors.Is(e, nfnl.ErrInterrupted) && !errors.Is(e, unix.ENOENT) { // the loss of a new client does no harm
				err = errors.Join(err, e)
			}
		}
		sets, e := conn.Sets(kubeProxyTable, inet.AF(family))
		note(e)
		for name := range sets {
			if !strings.HasPrefix(name, affinityPrefix) || len(name) <= len(affinityPrefix)+hashLength {
				continue
			}
			id := strings.ReplaceAll(name[len(affinityPrefix)+hashLength:], ":", ".")
			note(conn.Elements(kubeProxyTable, inet.AF(family), name, func(e nft.Element) {
				if addr, ok := netip.AddrFromSlice(e.Key); ok {
					c.byName[id] = append(c.byName[id], addr)
				}
			}))
		}
	}
	if err != nil {
		return fmt.Errorf("cannot read kube-proxy's sets of clients: %w", err)
	}
	return nil
}

// recentDir has a file for each list of xt_recent in the calling thread's network namespace.
const recentDir = "/proc/thread-self/net/xt_recent"

// readRecent reads the lists of kube-proxy's mode iptables, which are named like the chains of
// the endpoints.
func (c *Clients) readRecent() error {
	entries, err := os.ReadDir(recentDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "KUBE-SEP-") {
			continue
		}
		text, _ := os.ReadFile(recentDir + "/" + e.Name()) // its rules may be gone
		for line := range strings.Lines(string(text)) {
			// A line is like "src=192.0.2.9 ttl: 64 last_seen: 4295470320 oldest_pkt: 1 4295470320".
			first, _, _ := strings.Cut(line, " ")
			if addr, err := netip.ParseAddr(strings.TrimPrefix(first, "src=")); err == nil {
				c.byName[e.Name()] = append(c.byName[e.Name()], addr)
			}
		}
	}
	return nil
}
