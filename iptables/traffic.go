package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Every connection of a Service port passes one of the rules, in the chain of one of its pools, that lead to an
// endpoint or a group of endpoints. The sum of these rules' counters is the number of connections. The kernel keeps
// it while the chain stays. When the chain is written, carry adds the sum to one of its new rules.

// connections counts the connections of a pool: packets and bytes of their first packets.
type connections struct{ packets, bytes uint64 }

// Traffic reads the counters of the rules that choose an endpoint, and returns the number of connections of each
// Service port. Known is [dataplane.CountsConnections] alone.
//
// The counters outlast a restart and all changes except of the Service's own endpoints, which set them to 0 without
// [Config.CountTraffic]. With it, a change of endpoints misses the connections between its runs of iptables-save and
// iptables-restore. The counter of a Service port that has lost all endpoints is kept in this process alone.
//
// Traffic runs iptables-save for each family, which takes the time to print table nat. The error is the program's, or
// wraps [os.ErrClosed].
func (b *Backend) Traffic(ctx context.Context) (*dataplane.Traffic, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, errClosed
	}
	out := newTraffic()
	for _, f := range b.families {
		text, err := f.saved(ctx, nat, "-c")
		if err != nil {
			return nil, err
		}
		sumTraffic(poolConnections(text), poolOwners(text, f.family), out)
		for _, n := range f.kept {
			addTraffic(out, n.owner, n.connections)
		}
	}
	return out, nil
}

// Traffic returns the number of connections of each Service port, as [Backend.Traffic] does, without a [Backend]. The
// chains may be kube-proxy's. The error wraps [dataplane.ErrNoRules] if table nat has no rules in a chain
// KUBE-SERVICES.
func Traffic(ctx context.Context, c Config) (*dataplane.Traffic, error) {
	var out *dataplane.Traffic
	err := c.with(func(c Config, k kernel) (err error) {
		out, err = readTraffic(ctx, c, k)
		return err
	})
	return out, err
}

func readTraffic(ctx context.Context, c Config, k kernel) (*dataplane.Traffic, error) {
	out, any := newTraffic(), false
	err := each(ctx, c, k, func(f *family) error {
		text, err := f.saved(ctx, nat, "-c")
		any = any || strings.Contains(text, "-A "+chainServices+" ")
		sumTraffic(poolConnections(text), poolOwners(text, f.family), out)
		return err
	})
	if err != nil {
		return nil, err
	}
	if !any {
		return nil, fmt.Errorf("iptables: cannot read traffic: %w", dataplane.ErrNoRules)
	}
	return out, nil
}

func newTraffic() *dataplane.Traffic {
	return &dataplane.Traffic{Known: dataplane.CountsConnections, Services: map[tracker.Key]dataplane.Counters{}}
}

func sumTraffic(counted map[string]connections, owners map[string]tracker.Key, to *dataplane.Traffic) {
	for pool, n := range counted {
		if k, ok := owners[pool]; ok {
			addTraffic(to, k, n)
		}
	}
}

func addTraffic(to *dataplane.Traffic, k tracker.Key, n connections) {
	if n.packets != 0 {
		c := to.Services[k]
		c.Connections += n.packets
		to.Services[k] = c
	}
}

func isPoolChain(name string) bool {
	dispatches := slices.ContainsFunc(dispatchers[:], func(d dispatcher) bool {
		return d.table == nat && (name == d.root || strings.HasPrefix(name, d.prefix))
	})
	return strings.HasPrefix(name, prefixService) && !dispatches ||
		strings.HasPrefix(name, prefixLocal)
}

// leadsToEndpoint reports whether a rule of a pool's chain ends the choice.
func leadsToEndpoint(rule string) bool {
	return strings.HasPrefix(iptext.Target(rule), prefixEndpoint) // or prefixGroup
}

func (c connections) plus(o connections) connections {
	return connections{c.packets + o.packets, c.bytes + o.bytes}
}

func poolConnections(text string) map[string]connections {
	out, complete := map[string]connections{}, map[string]bool{}
	for line := range strings.Lines(text) {
		counters, rule, ok := strings.Cut(line, "] -A ")
		if !ok {
			continue
		}
		name, rule, _ := strings.Cut(strings.TrimSpace(rule), " ")
		var n connections
		if complete[name] || !isPoolChain(name) || !leadsToEndpoint(rule) {
			continue
		}
		// All connections take the first rule without a match: the last one, or the first to a group of remembered clients.
		complete[name] = strings.HasPrefix(rule, "-j ")
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
	next := map[string][]string{} // from chains of external addresses to the chains after them
	iptext.Scan(strings.NewReader(text), func(l iptext.Line) {
		to := iptext.Target(l.Rule)
		if !isPoolChain(to) && !strings.HasPrefix(to, prefixExternal) && !strings.HasPrefix(to, prefixFirewall) {
			return
		}
		if from := string(l.Chain); strings.HasPrefix(from, prefixExternal) || strings.HasPrefix(from, prefixFirewall) {
			next[from] = append(next[from], to)
		}
		r := iptext.ParseRule(string(l.Rule))
		namespace, rest, ok := strings.Cut(serviceName(r), "/")
		i := slices.IndexFunc(r.Matches, func(o iptext.Option) bool { return o.Name == "-p" })
		if !ok || i < 0 {
			return
		}
		service, port, _ := strings.Cut(rest, ":")
		out[to] = tracker.Key{ServicePortName: tracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: namespace, Name: service}, Port: port, Protocol: v1.Protocol(strings.ToUpper(r.Matches[i].Value)),
		}, Family: f}
	})
	for range 3 { // KUBE-FW-… to KUBE-FW-… to KUBE-EXT-… to a pool
		for from, list := range next {
			if k, ok := out[from]; ok {
				for _, to := range list {
					out[to] = k
				}
			}
		}
	}
	return out
}

// keptConnections is the connections of a pool without a chain, and the pool's Service port.
type keptConnections struct {
	connections
	owner tracker.Key
}

// carry reads the connections of the pools whose chains a batch writes or deletes, and makes the new chains begin
// with them. It returns those of the pools that have no chain once the batch is in effect.
func (f *family) carry(ctx context.Context, b *batch) (kept map[string]keptConnections) {
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
	text, err := f.saved(ctx, nat, "-c")
	if err != nil && !errors.Is(err, iptool.ErrUnreadable) { // which readKernel logs
		f.log.Warn("iptables: cannot read traffic counters, they begin again at 0", slog.Any("error", err))
	}
	counted, kept := poolConnections(text), maps.Clone(f.kept)
	for name, c := range b.puts[nat] {
		if isPoolChain(name) {
			if n := counted[name].plus(kept[name].connections); n.packets != 0 && c.begin(n) {
				b.puts[nat][name] = c
			}
			delete(kept, name)
		}
	}
	var owners map[string]tracker.Key
	for name := range b.drops[nat] {
		n := counted[name]
		if !isPoolChain(name) || n.packets == 0 {
			continue
		}
		if owners == nil {
			owners = poolOwners(text, f.family)
		}
		if kept == nil {
			kept = map[string]keptConnections{}
		}
		kept[name] = keptConnections{n.plus(kept[name].connections), owners[name]}
	}
	return kept
}

func (f *family) dropKept(changes []ruleset.Change) {
	if len(f.kept) == 0 {
		return
	}
	for _, c := range changes {
		if c.New == nil {
			maps.DeleteFunc(f.kept, func(_ string, n keptConnections) bool { return n.owner == c.Key })
		}
	}
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
