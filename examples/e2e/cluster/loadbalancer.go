package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/controllers/service"
	"k8s.io/component-base/featuregate"
	cmmetrics "k8s.io/component-base/metrics/prometheus/controllers"
)

// serveLoadBalancers starts upstream's service controller with balancers as its cloud. The
// controller runs until ctx ends.
func serveLoadBalancers(ctx context.Context, config *rest.Config) error {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	b := &balancers{all: map[string]balancer{}}
	f := informers.NewSharedInformerFactory(client, 0)
	c, err := service.New(b, client, f.Core().V1().Services(), f.Core().V1().Nodes(), "cluster", featuregate.NewFeatureGate())
	if err != nil {
		return err
	}
	f.Start(ctx.Done())
	go c.Run(ctx, 2, cmmetrics.NewControllerManagerMetrics("cluster"))
	go b.route(ctx)
	return nil
}

// balancers is a cloud that has load balancers alone. A load balancer is a route in the
// control plane's network namespace to the nodes whose health check succeeds. Clients run
// in that namespace. Packets reach the nodes with the load balancer's address as
// destination and the client's address as source.
type balancers struct {
	cloudprovider.Interface // nil: the service controller calls LoadBalancer alone

	mu  sync.Mutex
	all map[string]balancer // by the Service's UID
	// made counts the load balancers created so far. An address is reused only after all
	// other addresses were used.
	made int
}

// balancer is a load balancer. It is not changed, but replaced.
type balancer struct {
	ip       string
	check    string // port and path of the health check
	affinity bool   // all packets of a client go to one node
	nodes    []string
}

func (b *balancers) LoadBalancer() (cloudprovider.LoadBalancer, bool) { return b, true }

func (*balancers) GetLoadBalancerName(_ context.Context, _ string, s *v1.Service) string {
	return string(s.UID)
}

func (b *balancers) GetLoadBalancer(_ context.Context, _ string, s *v1.Service) (*v1.LoadBalancerStatus, bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l, ok := b.all[string(s.UID)]
	return l.status(), ok, nil
}

func (b *balancers) EnsureLoadBalancer(_ context.Context, _ string, s *v1.Service, nodes []*v1.Node) (*v1.LoadBalancerStatus, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := balancer{
		ip:       b.all[string(s.UID)].ip,
		check:    ":10256/healthz", // of kube-proxy, and of nodeproxy
		affinity: s.Spec.SessionAffinity == v1.ServiceAffinityClientIP,
	}
	if l.ip == "" {
		l.ip = strings.TrimSuffix(balancerRange, "0/24") + fmt.Sprint(b.made%254+1)
		b.made++
	}
	if p := s.Spec.HealthCheckNodePort; p != 0 {
		l.check = fmt.Sprintf(":%d/", p)
	}
	for _, n := range nodes {
		for _, a := range n.Status.Addresses {
			if a.Type == v1.NodeInternalIP && !strings.Contains(a.Address, ":") {
				l.nodes = append(l.nodes, a.Address)
			}
		}
	}
	slices.Sort(l.nodes)
	b.all[string(s.UID)] = l
	return l.status(), nil
}

func (b *balancers) UpdateLoadBalancer(ctx context.Context, cluster string, s *v1.Service, nodes []*v1.Node) error {
	_, err := b.EnsureLoadBalancer(ctx, cluster, s, nodes)
	return err
}

func (b *balancers) EnsureLoadBalancerDeleted(_ context.Context, _ string, s *v1.Service) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.all, string(s.UID))
	return nil
}

func (l balancer) status() *v1.LoadBalancerStatus {
	return &v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{IP: l.ip}}}
}

// route checks the health of all nodes twice a second and updates the routes.
func (b *balancers) route(ctx context.Context) {
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	routes := map[string]string{} // by address
	for ; ctx.Err() == nil; time.Sleep(500 * time.Millisecond) {
		b.mu.Lock()
		all := slices.Collect(maps.Values(b.all)) // a copy: the lock is not held during health checks
		b.mu.Unlock()
		want := map[string]string{}
		var commands []string
		for _, l := range all {
			if want[l.ip] = l.route(client); want[l.ip] != routes[l.ip] {
				commands = append(commands, "route replace "+l.ip+want[l.ip])
			}
		}
		for address := range routes {
			if want[address] == "" {
				commands = append(commands, "route del "+address)
			}
		}
		if len(commands) == 0 {
			continue
		}
		fmt.Fprintln(os.Stderr, strings.Join(commands, "\n"))
		if err := ip(commands...); err != nil {
			fmt.Fprintln(os.Stderr, err)
			continue
		}
		routes = want
	}
}

// route returns the route to the nodes that are healthy.
func (l balancer) route(client *http.Client) string {
	hops := ""
	for _, n := range l.nodes {
		r, err := client.Get("http://" + n + l.check)
		if err != nil {
			continue
		}
		r.Body.Close()
		if r.StatusCode == http.StatusOK && (hops == "" || !l.affinity) { // all clients have the same address
			hops += " nexthop via " + n
		}
	}
	if hops == "" {
		return " dev lost"
	}
	return " src " + balancerClient + hops
}
