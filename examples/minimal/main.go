// Minimal is a whole Service proxy of a node in one file, for network plugins that forward Services
// themselves in place of kube-proxy. It is made to be copied. deploy.yaml beside it has the rights
// that it needs, and a DaemonSet.
//
// Minimal follows Services, EndpointSlices, ServiceCIDRs and its own Node, and forwards with nftables. It
// ends stale UDP flows, opens health-check node ports, serves /healthz, /livez and kube-proxy's metrics,
// writes Events, and repairs rules that another process altered. When it ends, even by a kill, its rules stay in
// effect. The next process takes them over, without a lost connection.
//
// The node must forward packets (sysctl net.ipv4.ip_forward); network plugins set that. nodeproxy,
// beside this folder, has kube-proxy's flags, other modes, and more that operators expect.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // adds rest_client_* to the metrics

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/informers"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

type options struct {
	kubeconfig, node string
	healthz, metrics string
	podCIDRs         []netip.Prefix
}

func main() {
	var o options
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server; in a pod, its ServiceAccount by default")
	flag.StringVar(&o.node, "node", os.Getenv("NODE_NAME"), "name of this node; required, here or in NODE_NAME")
	flag.StringVar(&o.healthz, "healthz", ":10256", "where to serve /healthz and /livez")
	flag.StringVar(&o.metrics, "metrics", "127.0.0.1:10249", "where to serve /metrics")
	flag.Func("pod-cidr", "a range of pod addresses; other clients of cluster IPs are masqueraded (may be repeated)", func(s string) error {
		p, err := netip.ParsePrefix(s)
		o.podCIDRs = append(o.podCIDRs, p)
		return err
	})
	flag.Parse()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	// SIGTERM ends the agent, and leaves its rules.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, o, log); err != nil && ctx.Err() == nil {
		log.Error("the agent ends", "error", err)
		os.Exit(1)
	}
}

const (
	// retryPeriod is how soon a sync that failed is tried again.
	retryPeriod = 30 * time.Second
	// resyncPeriod is how often the whole state is compared with the kernel's.
	resyncPeriod = time.Hour
	// watchInterval is the least time between two looks at the rules after others changed theirs.
	watchInterval = 5 * time.Second
)

// run serves until ctx ends, or fails. It tells nothing to the kernel before all objects are known.
func run(ctx context.Context, o options, log *slog.Logger) error {
	if o.node == "" {
		return errors.New("--node is missing")
	}
	config, err := clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	// What others see of the agent. The objects that it observes need none of it.
	recorder := kubeapi.NewRecorder(client.CoreV1().RESTClient(), "minimal", o.node, log)
	defer recorder.Shutdown()
	set := metrics.NewSet(metrics.Config{Mode: "nftables", Families: []tracker.Family{tracker.IPv4, tracker.IPv6}})
	proxy, err := health.NewProxy(health.ProxyConfig{Timeout: 2 * retryPeriod, Answered: set.Answered})
	if err != nil {
		return err
	}
	ports := health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{ProxyHealthy: proxy.Healthy}), Log: log,
	})
	defer ports.Close(context.Background())

	// The way of an object: tracker, engine, backend, kernel.
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: o.node}, Log: log, Events: recorder})
	if err != nil {
		return err
	}
	engine, err := ruleset.NewEngine(ruleset.Config{
		Source: t, LocalTraffic: ruleset.LocalTraffic{CIDRs: o.podCIDRs}, Budget: ruleset.DefaultBudget(), Log: log,
	})
	if err != nil {
		return err
	}
	backend, err := nftables.New(ctx, nftables.Config{Log: log}) // needs CAP_NET_ADMIN; reports what the kernel lacks
	if err != nil {
		return err
	}
	defer backend.Close()
	cleaner, err := conntrack.New(ctx, conntrack.Config{Log: log, Hooks: &conntrack.Hooks{FlushedFamily: set.Flushed}})
	if err != nil {
		return err
	}
	defer cleaner.Close()
	rules := engine.Attach("nftables", set.Wrap(cleaner.Wrap(backend)))
	rules.OnSync(set.Synced)
	// Load balancers and metrics hear of a change when it is in effect.
	checks, counts := rules.Follow("health", ports), rules.Follow("metrics", set)
	loop, err := runner.New(runner.Config{
		// An expensive sync is followed by a pause of the same length.
		Pace: runner.Pace{Factor: 1, Most: time.Second}, Retry: retryPeriod,
		Max: resyncPeriod, Resync: rules.Resync,
		Log: log, Hooks: runner.Join(proxy.Hooks(), set.Hooks(t.Synced)),
	}, func(ctx context.Context) error { return ruleset.SyncAll(ctx, rules, checks, counts) })
	if err != nil {
		return err
	}
	engine.Notify(loop.Trigger)

	feed := informers.Config{
		Client: client, Tracker: t, Engine: engine, Node: o.node, Log: log, Contact: set.Contact,
		ReceiveService: set.ReceiveService, ReceiveSlice: set.ReceiveSlice,
		OnNode: func(_ string, n *v1.Node) {
			reason := "the Node object is gone"
			if n != nil {
				reason = health.WhyIneligible(n)
			}
			proxy.SetIneligible(reason) // /healthz tells load balancers
		},
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return informers.Feed(ctx, feed) })
	g.Go(func() error { return loop.Run(ctx) })
	g.Go(func() error { return cleaner.Run(ctx) })
	g.Go(func() error {
		return backend.Watch(ctx, watchInterval, func(err error) {
			log.Warn("another process altered the rules, or they cannot be read", "error", err)
			rules.Resync()
			loop.Trigger()
		})
	})
	probes, pages := http.NewServeMux(), http.NewServeMux()
	probes.Handle("/healthz", proxy.Healthz())
	probes.Handle("/livez", proxy.Livez())
	pages.Handle("/metrics", set.Handler())
	g.Go(func() error { return serve(ctx, o.healthz, probes, log) })
	g.Go(func() error { return serve(ctx, o.metrics, pages, log) })
	return g.Wait()
}

// serve serves h at an address until ctx ends. Another process may have the address for a time, such as
// the agent before this one.
func serve(ctx context.Context, address string, h http.Handler, log *slog.Logger) error {
	for {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
		if err == nil {
			s := health.NewServer(h, log)
			stop := context.AfterFunc(ctx, func() { s.Close() })
			err = s.Serve(l)
			stop()
		}
		if ctx.Err() != nil {
			return nil
		}
		log.Warn("cannot serve", "address", address, "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchInterval):
		}
	}
}
