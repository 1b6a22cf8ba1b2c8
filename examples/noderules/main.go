// Noderules is a controller that compiles the rules of all nodes in one process and writes them as files, for
// authors of products whose nodes run no agent: appliances, SmartNICs, machines under configuration
// management. Each node gets a folder with transactions, which "nft -f" applies in the order of their names:
//
//	noderules --dir /srv/rules --pod-cidr 10.244.0.0/16
//	/srv/rules/node-a/00000001.nft    replaces the tables
//	/srv/rules/node-a/00000002.nft    what changed
//
// Package ruleset/placement computes each Service once for the nodes that see it alike, and an
// [nftables.Renderer] for each node and family makes the text. There is no kernel here. After
// a restart, each node's first file replaces everything.
//
// Two things are easily done wrong here:
//   - The tracker and the Engine have no node of their own. With one, every node would get that node's rules.
//   - A transaction that did not reach its node must not be forgotten: the next one builds on it. Here a failed
//     write makes the node's next transaction a full one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/go-proxier/proxier/examples/informers"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/placement"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server; in a pod, its ServiceAccount by default")
	dir := flag.String("dir", "", "where to write; required")
	var local ruleset.LocalTraffic
	flag.Func("pod-cidr", "a range of pod addresses; other clients of cluster IPs are masqueraded (may be repeated)", func(s string) error {
		p, err := netip.ParsePrefix(s)
		local.CIDRs = append(local.CIDRs, p)
		return err
	})
	var stages nftables.Stages
	flag.BoolVar(&stages.NoMasquerade, "no-masquerade", false, "a firewall of the nodes masquerades packets with the mark 0x4000, and those of a pod to itself")
	flag.BoolVar(&stages.NoFilter, "no-filter", false, "a firewall of the nodes refuses connections to unused addresses and ports of Services")
	flag.IntVar(&stages.DestinationNAT, "dnat-priority", 0, "what is added to the `priority` of the chains that choose endpoints, to place them before or after those of a firewall")
	flag.Parse()
	if *dir == "" {
		log.Fatal("--dir is missing")
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, client, local, stages, *dir, slog.Default()); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

// run writes rules until ctx ends.
func run(ctx context.Context, client kubernetes.Interface, local ruleset.LocalTraffic, stages nftables.Stages, dir string, log *slog.Logger) error {
	// Without a node of its own, the tracker does not wait for Nodes.
	t, err := tracker.New(tracker.Config{Kinds: []tracker.Kind{tracker.KindServices, tracker.KindSlices}, Log: log})
	if err != nil {
		return err
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t, LocalTraffic: local, Budget: ruleset.DefaultBudget(), Log: log})
	if err != nil {
		return err
	}
	n := &nodes{dir: dir, log: log, stages: stages, places: placement.New(), ports: map[tracker.Key]*ruleset.Port{}, nodes: map[string]*node{}}
	cursor := engine.Attach("nodes", n)
	loop, err := runner.New(runner.Config{Min: 100 * time.Millisecond, Log: log}, func(ctx context.Context) error {
		return errors.Join(cursor.Sync(ctx), n.writeFull())
	})
	if err != nil {
		return err
	}
	engine.Notify(loop.Trigger)

	onNode := func(name string, o *v1.Node) {
		if o == nil {
			n.remove(name)
		} else if n.set(tracker.NodeInfoOf(o)) {
			loop.Trigger()
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return loop.Run(ctx) })
	g.Go(func() error {
		return informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Engine: engine, OnNode: onNode, Log: log})
	})
	return g.Wait()
}

// nodes are the nodes of the cluster. It is a [ruleset.Backend].
type nodes struct {
	dir    string
	log    *slog.Logger
	stages nftables.Stages

	mu     sync.Mutex
	places *placement.Placements
	node   *ruleset.Node // the Engine's
	ports  map[tracker.Key]*ruleset.Port
	nodes  map[string]*node
}

// node is the state of one node's files.
type node struct {
	files int
	// renderers is empty if the next file must replace everything.
	renderers []*nftables.Renderer
}

// Apply implements [ruleset.Backend].
func (n *nodes) Apply(_ context.Context, d *ruleset.Delta) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.node = d.Node
	if d.Full || d.Node != d.OldNode {
		for _, x := range n.nodes {
			x.renderers = nil
		}
	}
	if d.Full {
		clear(n.ports)
	}
	changes := map[string][]ruleset.Change{}
	for i := range d.Changes {
		c := &d.Changes[i]
		if n.ports[c.Key] = c.New; c.New == nil {
			delete(n.ports, c.Key)
		}
		for c := range n.places.Changes(d, c) {
			for name := range c.Nodes() {
				changes[name] = append(changes[name], c.Change)
			}
		}
	}
	for name, list := range changes {
		if x := n.nodes[name]; len(x.renderers) != 0 {
			n.write(name, x, &ruleset.Delta{Node: d.Node, OldNode: d.Node, Changes: list})
		}
	}
	return nil // writeFull repairs what could not be written
}

// writeFull writes everything for the nodes that need it.
func (n *nodes) writeFull() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.node == nil {
		return nil
	}
	var errs []error
	for name, x := range n.nodes {
		if len(x.renderers) != 0 {
			continue
		}
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			r, err := nftables.NewRenderer(nftables.Config{Stages: n.stages}, f)
			if err != nil {
				return err
			}
			x.renderers = append(x.renderers, r)
		}
		full := &ruleset.Delta{Full: true, Node: n.node}
		for _, key := range slices.SortedFunc(maps.Keys(n.ports), tracker.Key.Compare) {
			if p := n.places.Service(n.node, n.ports[key], name); p != nil {
				full.Changes = append(full.Changes, ruleset.Change{Key: key, New: p})
			}
		}
		errs = append(errs, n.write(name, x, full))
	}
	return errors.Join(errs...)
}

// write writes a transaction of a node as its next file. After a failure the node needs everything again.
func (n *nodes) write(name string, x *node, d *ruleset.Delta) error {
	text := ""
	for _, r := range x.renderers {
		t, err := r.Render(d)
		if t == nil { // a rule of the node itself changed, or the model cannot go on
			x.renderers = nil
			return err
		}
		if err != nil {
			n.log.Warn("some Services have no rules", "node", name, "error", err)
		}
		if d.Full {
			// The table may exist: make it, to be able to delete it.
			family := map[tracker.Family]string{tracker.IPv4: "ip", tracker.IPv6: "ip6"}[t.Family()]
			text += fmt.Sprintf("table %s proxier\ndelete table %s proxier\n", family, family)
		}
		text += t.String()
	}
	if text == "" {
		return nil
	}
	x.files++
	file := filepath.Join(n.dir, name, fmt.Sprintf("%08d.nft", x.files))
	err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file+".tmp", []byte(text), 0o644), os.Rename(file+".tmp", file))
	if err != nil {
		n.log.Warn("cannot write rules", "node", name, "error", err)
		x.renderers = nil
	}
	return err
}

// set adds a node or changes what is known of it, and reports whether it needs everything.
func (n *nodes) set(info tracker.NodeInfo) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.places.SetNode(info) { // a heartbeat
		return false
	}
	x := n.nodes[info.Name]
	if x == nil {
		x = &node{}
		n.nodes[info.Name] = x
		// Numbers go on behind those of an earlier process.
		files, _ := filepath.Glob(filepath.Join(n.dir, info.Name, "*.nft"))
		for _, f := range files {
			var number int
			if _, err := fmt.Sscanf(filepath.Base(f), "%d.nft", &number); err == nil {
				x.files = max(x.files, number)
			}
		}
	}
	x.renderers = nil
	return true
}

func (n *nodes) remove(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.places.DeleteNode(name)
	delete(n.nodes, name)
}
