// Meshtables is a small control plane of a service mesh. It sends the proxy of each node the
// endpoints that a Service has for that node, by topology: traffic policies, zones and hints.
// It touches no kernel, and runs once for a cluster. It is for authors of control planes that
// speak xDS or a protocol of their own.
//
//	meshtables --listen :18000
//	curl 'http://localhost:18000/endpoints/node-a?after=17'
//
// The answer resembles xDS's endpoint discovery in JSON. With after, it waits until the node's table
// is newer than that version, or a minute has passed:
//
//	{"version": 18, "clusters": [{"cluster_name": "shop/web:http/TCP/IPv4",
//	  "endpoints": [{"locality": {"zone": "z1"}, "lb_endpoints": [{"address": "10.0.0.1:8080", "weight": 1}]}]}]}
//
// Two things are easily done wrong here:
//   - The tracker and the Engine have no node of their own. With one, every node would get that node's view.
//   - The endpoints of a node are those of a frontend's pool ([ruleset.Port.Pool]).
//     Port.Endpoints also has endpoints that are not ready or in other zones.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/go-proxier/proxier/examples/informers"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/placement"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server; in a pod, its ServiceAccount by default")
	listen := flag.String("listen", ":18000", "where to answer")
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, client, l, slog.Default()); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

// run answers at l until ctx ends.
func run(ctx context.Context, client kubernetes.Interface, l net.Listener, log *slog.Logger) error {
	// Without a node of its own, the tracker does not wait for Nodes.
	t, err := tracker.New(tracker.Config{Kinds: []tracker.Kind{tracker.KindServices, tracker.KindSlices}, Log: log})
	if err != nil {
		return err
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t, Log: log})
	if err != nil {
		return err
	}
	tables := newTables()
	cursor := engine.Attach("tables", tables)
	loop, err := runner.New(runner.Config{Log: log}, cursor.Sync)
	if err != nil {
		return err
	}
	engine.Notify(loop.Trigger)

	g, ctx := errgroup.WithContext(ctx)
	server := &http.Server{Handler: tables, BaseContext: func(net.Listener) context.Context { return ctx }, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { server.Close() })
	g.Go(func() error { return server.Serve(l) })
	g.Go(func() error { return loop.Run(ctx) })
	g.Go(func() error {
		return informers.Feed(ctx, informers.Config{Client: client, Tracker: t, OnNode: tables.setNode, Log: log})
	})
	return g.Wait()
}

// tables holds the table of each node. It is a [ruleset.Backend]: the Engine passes it
// the changes, and the Placements find the nodes that they concern.
type tables struct {
	mu     sync.Mutex
	places *placement.Placements
	node   *ruleset.Node // the Engine's
	ports  map[tracker.Key]*ruleset.Port
	// version counts the changes. nodes has the version of each node's table.
	version uint64
	nodes   map[string]uint64
	// changed is closed at the next change.
	changed chan struct{}
}

func newTables() *tables {
	return &tables{
		places: placement.New(), ports: map[tracker.Key]*ruleset.Port{},
		nodes: map[string]uint64{}, changed: make(chan struct{}),
	}
}

// Apply implements [ruleset.Backend].
func (t *tables) Apply(_ context.Context, d *ruleset.Delta) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.node = d.Node
	t.version++
	for i := range d.Changes {
		c := &d.Changes[i]
		if t.ports[c.Key] = c.New; c.New == nil {
			delete(t.ports, c.Key)
		}
		for c := range t.places.Changes(d, c) {
			for node := range c.Nodes() {
				t.nodes[node] = t.version
			}
		}
	}
	t.wake()
	return nil
}

// wake wakes the requests that wait. The caller holds mu.
func (t *tables) wake() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// setNode sets a node, or deletes it if n is nil.
func (t *tables) setNode(name string, n *v1.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n == nil {
		t.places.DeleteNode(name)
		delete(t.nodes, name)
	} else if t.places.SetNode(tracker.NodeInfoOf(n)) { // its zone, for example; not each heartbeat
		t.version++
		t.nodes[name] = t.version
		t.wake()
	}
}

// answer, cluster, locality and endpoint are the JSON of an answer.
type (
	answer struct {
		Version  uint64    `json:"version"`
		Clusters []cluster `json:"clusters"`
	}
	cluster struct {
		Name      string     `json:"cluster_name"`
		Endpoints []locality `json:"endpoints"`
	}
	locality struct {
		Locality struct {
			Zone string `json:"zone,omitempty"`
		} `json:"locality"`
		Endpoints []endpoint `json:"lb_endpoints"`
	}
	endpoint struct {
		Address string `json:"address"`
		Weight  uint16 `json:"weight"`
	}
)

// longest is how long a request waits for a change.
const longest = time.Minute

// ServeHTTP answers a request for the table of a node.
func (t *tables) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, ok := strings.CutPrefix(r.URL.Path, "/endpoints/")
	after, err := strconv.ParseUint("0"+r.URL.Query().Get("after"), 10, 64)
	if !ok || err != nil {
		http.Error(w, "ask for /endpoints/NODE?after=VERSION", http.StatusNotFound)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), longest)
	defer cancel()
	out, err := t.wait(ctx, name, after)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out)
}

// wait returns the table of a node when it is newer than after, or ctx ends.
func (t *tables) wait(ctx context.Context, node string, after uint64) (*answer, error) {
	for {
		t.mu.Lock()
		version, known := t.nodes[node]
		ready := t.node != nil && known
		// A version from before a restart of this program may be ahead.
		if ready && (version > after || after > t.version || ctx.Err() != nil) {
			defer t.mu.Unlock()
			return t.table(node, version), nil
		}
		changed := t.changed
		t.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			if !ready {
				return nil, errors.New("the node is unknown, or not all Services are listed yet")
			}
		}
	}
}

// table makes the table of a node. The caller holds mu.
func (t *tables) table(node string, version uint64) *answer {
	out := &answer{Version: version, Clusters: []cluster{}}
	for key, port := range t.ports {
		on := t.places.Service(t.node, port, node)
		if on == nil || len(on.Frontends) == 0 {
			continue
		}
		c := cluster{Name: key.String()}
		pool := slices.Clone(on.Pool(on.Frontends[0].Internal)) // the first frontend is the cluster IP
		slices.SortFunc(pool, func(a, b *tracker.Endpoint) int {
			if n := strings.Compare(a.Zone, b.Zone); n != 0 {
				return n
			}
			return a.Addr.Compare(b.Addr)
		})
		for i, ep := range pool {
			if i == 0 || ep.Zone != pool[i-1].Zone {
				l := locality{}
				l.Locality.Zone = ep.Zone
				c.Endpoints = append(c.Endpoints, l)
			}
			last := &c.Endpoints[len(c.Endpoints)-1]
			last.Endpoints = append(last.Endpoints, endpoint{ep.Addr.String(), ep.Weight})
		}
		out.Clusters = append(out.Clusters, c)
	}
	slices.SortFunc(out.Clusters, func(a, b cluster) int { return strings.Compare(a.Name, b.Name) })
	return out
}
