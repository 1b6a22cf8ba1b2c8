// Announcer is an agent with a speaker: it forwards by nftables, and reports the
// load-balancer IPs that its node serves, and the external IPs in the ranges of
// -external-ips. It is for authors of network plugins that announce Services by BGP or
// ARP. Here the speaker prints its announcements, one line for each change:
//
//	announce 203.0.113.1 shop/web
//	withdraw 203.0.113.1
//
// A [follower] decides, after the rules are in effect. With policy Local, the address of a node whose last
// endpoint terminates is withdrawn, while its rules still serve the packets that arrive.
//
// Announcer leaves out the rest of an agent: see examples/minimal for health checks, metrics, Events and repair.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/go-proxier/proxier/examples/informers"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server; in a pod, its ServiceAccount by default")
	node := flag.String("node", os.Getenv("NODE_NAME"), "name of this node")
	var externalIPs []netip.Prefix
	flag.Func("external-ips", "range of external IPs to announce, once for each range; users may write any in a Service", func(text string) error {
		p, err := netip.ParsePrefix(text)
		externalIPs = append(externalIPs, p)
		return err
	})
	flag.Parse()
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
	if err := run(ctx, client, *node, externalIPs, nftables.Config{Log: slog.Default()}, os.Stdout); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

// run forwards and writes lines to out until ctx ends. The rules stay: a speaker that ends withdraws its addresses.
func run(ctx context.Context, client kubernetes.Interface, node string, externalIPs []netip.Prefix, c nftables.Config, out io.Writer) error {
	t, err := tracker.New(tracker.Config{
		Node: tracker.NodeInfo{Name: node}, Log: c.Log,
	})
	if err != nil {
		return err
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t, Budget: ruleset.DefaultBudget(), Log: c.Log})
	if err != nil {
		return err
	}
	backend, err := nftables.New(ctx, c)
	if err != nil {
		return err
	}
	defer backend.Close()
	rules := engine.Attach("nftables", backend)
	speaker := rules.Follow("speaker", newFollower(func(a address) {
		if !a.Serves {
			fmt.Fprintln(out, "withdraw", a.Addr)
			return
		}
		var names []string
		for name := range a.Services {
			names = append(names, tracker.ServicePortName{NamespacedName: name}.String())
		}
		slices.Sort(names)
		fmt.Fprintln(out, "announce", a.Addr, strings.Join(names, " "))
	}, externalIPs))
	loop, err := runner.New(runner.Config{Log: c.Log}, func(ctx context.Context) error { return ruleset.SyncAll(ctx, rules, speaker) })
	if err != nil {
		return err
	}
	engine.Notify(loop.Trigger)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return loop.Run(ctx) })
	g.Go(func() error {
		return informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: node, Log: c.Log})
	})
	return g.Wait()
}
