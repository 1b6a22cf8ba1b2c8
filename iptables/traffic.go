//go:build linux

package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Every connection of a Service port passes one of the rules, in the chain of one of its
// pools, that lead to an endpoint or a group of endpoints. The sum of these rules' counters is
// the number of connections. The kernel keeps it while the chain stays, also when another
// process takes over, because a full delta does not write chains that are right. When the chain
// is written, carry adds the sum to one of its new rules.

// connections counts the connections of a pool: packets and bytes of their first packets.
type connections struct{ packets, bytes uint64 }

// Traffic reads the counters of the rules that choose an endpoint, and returns the number of
// connections of each Service port. Known is [ruleset.CountsConnections] alone: only first
// packets pass table nat, and the rules that refuse and drop come and go with endpoints.
//
// The counters outlast a restart and all changes except of the Service's own endpoints.
// Without [Config.CountTraffic] the counter of a Service port begins again at 0 when its
// endpoints change. With it, a change of endpoints misses the connections that are made between
// its runs of iptables-save and iptables-restore. The counter of a Service port that has lost
// all endpoints is kept in this process alone.
//
// Traffic runs iptables-save for each family, which takes the time to print table nat. The error
// is the program's, or [os.ErrClosed].
func (b *Backend) Traffic(ctx context.Context) (*ruleset.Traffic, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, os.ErrClosed
	}
	out := newTraffic()
	for _, f := range b.families {
		text, err := f.tool.counted(ctx)
		if err != nil {
			return nil, err
		}
		counted := poolConnections(text)
		if f.model == nil {
			sumTraffic(counted, poolOwners(text, f.family), out)
			continue
		}
		for pool, n := range f.kept {
			counted[pool] = counted[pool].plus(n)
		}
		owners := map[string]tracker.Key{}
		for _, s := range f.model.services {
			r := serviceRenderer{settings: f.settings, s: s, id: serviceID(s.Key)}
			owners[r.poolChain(ruleset.ToCluster)], owners[r.poolChain(ruleset.ToLocal)] = s.Key, s.Key
		}
		for pool := range f.kept {
			if _, ok := owners[pool]; !ok {
				delete(f.kept, pool)
			}
		}
		sumTraffic(counted, owners, out)
	}
	return out, nil
}

// Traffic returns the number of connections of each Service port, as [Backend.Traffic] does,
// without a [Backend]. The chains may be kube-proxy's. It changes nothing. The error wraps
// [ruleset.ErrNoRules] if table nat has no chain KUBE-SERVICES.
func Traffic(ctx context.Context, c Config) (*ruleset.Traffic, error) {
	out, any := newTraffic(), false
	_, err := c.each(ctx, func(f *family) error {
		text, err := f.tool.counted(ctx)
		any = any || strings.Contains(text, "\n:"+chainServices+" ")
		sumTraffic(poolConnections(text), poolOwners(text, f.family), out)
		return err
	})
	if err != nil {
		return nil, err
	}
	if !any {
		return nil, fmt.Errorf("iptables: cannot read traffic: %w", ruleset.ErrNoRules)
	}
	return out, nil
}

func newTraffic() *ruleset.Traffic {
	return &ruleset.Traffic{Known: ruleset.CountsConnections, Services: map[tracker.Key]ruleset.Counters{}}
}

// sumTraffic adds the connections of pools to their Service ports in to.
func sumTraffic(counted map[string]connections, owners map[string]tracker.Key, to *ruleset.Traffic) {
	for pool, n := range counted {
		if k, ok := owners[pool]; ok && n.packets != 0 {
			c := to.Services[k]
			c.Connections += n.packets
			to.Services[k] = c
		}
	}
}

// counted returns the output of iptables-save for table nat, with counters.
func (t tool) counted(ctx context.Context) (string, error) {
	var out strings.Builder
	if err := t.Save(ctx, nat.String(), &out, "-c"); err != nil {
		return "", fmt.Errorf("iptables: cannot read the counters of table nat: %w", err)
	}
	return out.String(), nil
}

// isPoolChain reports whether a chain chooses among the endpoints of a pool.
func isPoolChain(name string) bool {
	return strings.HasPrefix(name, prefixService) && !strings.HasPrefix(name, dispatchers[toServices].prefix) ||
		strings.HasPrefix(name, prefixLocal)
}

// leadsToEndpoint reports whether a rule of a pool's chain ends the choice.
func leadsToEndpoint(rule string) bool {
	return strings.HasPrefix(target([]byte(rule)), prefixEndpoint) // or prefixGroup
}

func (c connections) plus(o connections) connections {
	return connections{c.packets + o.packets, c.bytes + o.bytes}
}

// poolConnections returns the connections of each pool, by its chain.
func poolConnections(text string) map[string]connections {
	out := map[string]connections{}
	for line := range strings.Lines(text) {
		counters, rule, ok := strings.Cut(line, "] -A ")
		if !ok {
			continue
		}
		name, rule, _ := strings.Cut(strings.TrimSpace(rule), " ")
		var n connections
		if !isPoolChain(name) || !leadsToEndpoint(rule) {
			continue
		}
		if _, err := fmt.Sscanf(counters, "[%d:%d", &n.packets, &n.bytes); err == nil {
			out[name] = out[name].plus(n)
		}
	}
	return out
}

// poolOwners returns the Service port of each pool's chain, from the comments of the rules that
// lead there.
func poolOwners(text string, f tracker.Family) map[string]tracker.Key {
	out := map[string]tracker.Key{}
	chains := parseRules(text)
	var follow func(chain string, k tracker.Key)
	follow = func(chain string, k tracker.Key) {
		if isPoolChain(chain) {
			out[chain] = k
			return
		}
		for _, r := range chains[chain] {
			if isPoolChain(r.target) || strings.HasPrefix(r.target, prefixExternal) {
				follow(r.target, k)
			}
		}
	}
	for _, rules := range chains {
		for _, r := range rules {
			name, protocol := r.service(), v1.Protocol("")
			for _, m := range r.matches {
				if m.option == "-p" {
					protocol = v1.Protocol(strings.ToUpper(m.value))
				}
			}
			named := isPoolChain(r.target) || strings.HasPrefix(r.target, prefixExternal) || strings.HasPrefix(r.target, prefixFirewall)
			if name == "" || protocol == "" || !named {
				continue
			}
			namespace, rest, _ := strings.Cut(name, "/")
			service, port, _ := strings.Cut(rest, ":")
			follow(r.target, tracker.Key{ServicePortName: tracker.ServicePortName{
				NamespacedName: types.NamespacedName{Namespace: namespace, Name: service}, Port: port, Protocol: protocol,
			}, Family: f})
		}
	}
	return out
}

// carry reads the connections of the pools whose chains a batch writes or deletes, and makes the
// new chains begin with them. It returns the connections of the pools that have no chain once
// the batch is in effect.
func (f *family) carry(ctx context.Context, b *batch) (kept map[string]connections) {
	touched := false
	for name := range b.puts[nat] {
		touched = touched || isPoolChain(name)
	}
	for name := range b.drops[nat] {
		touched = touched || isPoolChain(name)
	}
	if !f.countTraffic || !touched {
		return f.kept
	}
	text, err := f.tool.counted(ctx)
	if err != nil {
		f.log.Warn("iptables: cannot read traffic counters, they begin again at 0", slog.Any("error", err))
	}
	counted, kept := poolConnections(text), map[string]connections{}
	for name, n := range f.kept {
		counted[name] = counted[name].plus(n)
		kept[name] = n
	}
	for name, c := range b.puts[nat] {
		if isPoolChain(name) {
			if n := counted[name]; n.packets != 0 && c.begin(n) {
				b.puts[nat][name] = c
			}
			delete(kept, name)
		}
	}
	for name := range b.drops[nat] {
		if n := counted[name]; isPoolChain(name) && n.packets != 0 {
			kept[name] = n
		}
	}
	return kept
}

// begin sets the counter of a pool's chain to n. It reports whether the chain has a rule that
// counts connections.
func (c *chain) begin(n connections) bool {
	i := slices.IndexFunc(c.rules, leadsToEndpoint)
	if i < 0 {
		return false
	}
	c.rules = slices.Clone(c.rules)
	c.rules[i] = fmt.Sprintf("-c %d %d %s", n.packets, n.bytes, c.rules[i])
	return true
}
