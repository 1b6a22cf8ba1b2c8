//go:build linux

package takeover

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
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

// Clients holds the clients that kube-proxy remembers for endpoints of Services with client affinity, by the
// name that it gives to an endpoint's memory.
type Clients map[string][]netip.Addr

// ReadClients reads what kube-proxy remembers in its modes nftables and iptables in the network
// namespace that ns is an open file of. It returns what it could read, with the errors of the rest.
func ReadClients(ns *os.File) (Clients, error) {
	c := Clients{}
	return c, errors.Join(c.readSets(ns), netns.In(ns, c.readRecent))
}

// Of returns the clients of an endpoint of a Service port. Their timeouts begin again, so the time since
// the last connection of each is 0. The result is the caller's.
func (c Clients) Of(k tracker.Key, endpoint netip.AddrPort) map[netip.Addr]time.Duration {
	out := map[netip.Addr]time.Duration{}
	for _, addr := range slices.Concat(c[setName(k, endpoint)], c[iptables.EndpointChain(k, endpoint)]) {
		out[addr] = 0
	}
	return out
}

// WriteRecent writes the clients that kube-proxy's nftables mode remembers for the endpoints of a full delta
// to the lists of xt_recent that package iptables uses, in the network namespace that ns is an open
// file of. The delta must be in effect: the kernel has a list only while a rule refers to it. The timeouts of
// the clients begin again. WriteRecent continues after an error.
func (c Clients) WriteRecent(ns *os.File, d *ruleset.Delta) error {
	return netns.In(ns, func() (err error) {
		for i := range d.Changes {
			s := d.Changes[i].New
			if s == nil || s.Spec.Affinity == 0 {
				continue
			}
			for _, ep := range s.Selection.Reachable {
				for _, addr := range c[setName(s.Key, ep.Addr)] {
					// The kernel takes one client from each open file.
					err = errors.Join(err, os.WriteFile(recentDir+"/"+iptables.EndpointChain(s.Key, ep.Addr), []byte("+"+addr.String()+"\n"), 0o644))
				}
			}
		}
		return err
	})
}

// setName returns the end of the name of the set of an endpoint's clients in kube-proxy's nftables mode.
func setName(k tracker.Key, endpoint netip.AddrPort) string {
	return fmt.Sprintf("%s/%s/%s/%s__%s/%d", k.Namespace, k.Name, strings.ToLower(string(k.Protocol)), k.Port,
		strings.ReplaceAll(endpoint.Addr().String(), ":", "."), endpoint.Port())
}

// readSets reads the sets of kube-proxy's nftables mode.
func (c Clients) readSets(ns *os.File) error {
	conn, err := nft.Dial(ns, sendBuffer)
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, family := range families {
		sets, e := conn.Sets(kubeProxyTable, inet.AF(family))
		failed := []error{e}
		for set := range sets {
			if name, ok := affinityName(set); ok {
				failed = append(failed, conn.Elements(kubeProxyTable, inet.AF(family), set, func(e nft.Element) {
					if addr, ok := netip.AddrFromSlice(e.Key); ok {
						c[name] = append(c[name], addr)
					}
				}))
			}
		}
		for _, e := range failed {
			if e != nil && !errors.Is(e, nfnl.ErrInterrupted) && !errors.Is(e, unix.ENOENT) { // the loss of a new client does no harm
				err = errors.Join(err, fmt.Errorf("cannot read kube-proxy's sets of clients: %w", e))
			}
		}
	}
	return err
}

// affinityName returns the end of the name of a set of clients, which setName returns, too. A set is named
// like affinity-7TCSBJI4-default/web/tcp/http__10.1.0.2/8080, with a hash.
func affinityName(set string) (name string, ok bool) {
	rest, ok := strings.CutPrefix(set, "affinity-")
	_, name, dashed := strings.Cut(rest, "-")
	return strings.ReplaceAll(name, ":", "."), ok && dashed
}

// recentDir has a file for each list of xt_recent in the calling thread's network namespace.
const recentDir = "/proc/thread-self/net/xt_recent"

// readRecent reads the lists of kube-proxy's mode iptables, which are named like the chains of
// the endpoints.
func (c Clients) readRecent() error {
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
				c[e.Name()] = append(c[e.Name()], addr)
			}
		}
	}
	return nil
}
