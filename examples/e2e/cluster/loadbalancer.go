package main

import (
	"context"
	"fmt"
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
	b := &balancers{all: map[string]*balancer{}}
	f := informers.NewSharedInformerFactory(client, 0)
	c, err := service.New(b, client, f.Core().V1().Services(), f.Core().V1().Nodes(), b.ProviderName(), featuregate.NewFeatureGate())
	if err != nil {
		return err
	}
	f.Start(ctx.Done())
	go c.Run(ctx, 2, cmmetrics.NewControllerManagerMetrics(b.ProviderName()))
	go b.route(ctx)
	return nil
}

// balancers is a cloud that has load balancers alone. A load balancer is a route in the
// control plane's network namespace to the nodes whose health check succeeds. Clients run
// in that namespace. Packets reach the nodes with the load balancer's address as
// destination and the client's address as source.
type balancers struct {
	mu  sync.Mutex
	all map[string]*balancer // by the Service's UID
	// made counts the load balancers created so far. An address is reused only after all
	// other addresses were used.
	made int
}

type balancer struct {
	ip       string
	check    string // port and path of the health check
	affinity bool   // all packets of a client go to one node
	nodes    []string
	routed   string // the nodes that the route leads to
}

var _ cloudprovider.Interface = (*balancers)(nil)

func (*balancers) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {}
func (b *balancers) LoadBalancer() (cloudprovider.LoadBalancer, bool)                { return b, true }
func (*balancers) Instances() (cloudprovider.Instances, bool)                        { return nil, false }
func (*balancers) InstancesV2() (cloudprovider.InstancesV2, bool)                    { return nil, false }
func (*balancers) Zones() (cloudprovider.Zones, bool)                                { return nil, false }
func (*balancers) Clusters() (cloudprovider.Clusters, bool)                          { return nil, false }
func (*balancers) Routes() (cloudprovider.Routes, bool)                              { return nil, false }
func (*balancers) ProviderName() string                                              { return "routes" }
func (*balancers) HasClusterID() bool                                                { return true }

func (*balancers) GetLoadBalancerName(_ context.Context, _ string, s *v1.Service) string {
	return string(s.UID)
}

func (b *balancers) GetLoadBalancer(_ context.Context, _ string, s *v1.Service) (*v1.LoadBalancerStatus, bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.all[string(s.UID)]
	if l == nil {
		return nil, false, nil
	}
	return l.status(), true, nil
}

func (b *balancers) EnsureLoadBalancer(_ context.Context, _ string, s *v1.Service, nodes []*v1.Node) (*v1.LoadBalancerStatus, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.all[string(s.UID)]
	if l == nil {
		l = &balancer{ip: strings.TrimSuffix(balancerRange, "0/24") + fmt.Sprint(b.made%254+1)}
		b.made++
		b.all[string(s.UID)] = l
	}
	l.check = ":10256/healthz" // of kube-proxy, and of nodeproxy
	if p := s.Spec.HealthCheckNodePort; p != 0 {
		l.check = fmt.Sprintf(":%d/", p)
	}
	l.affinity = s.Spec.SessionAffinity == v1.ServiceAffinityClientIP
	l.nodes = nil
	for _, n := range nodes {
		for _, a := range n.Status.Addresses {
			if a.Type == v1.NodeInternalIP && !strings.Contains(a.Address, ":") {
				l.nodes = append(l.nodes, a.Address)
			}
		}
	}
	slices.Sort(l.nodes)
	return l.status(), nil
}

func (b *balancers) UpdateLoadBalancer(ctx context.Context, cluster string, s *v1.Service, nodes []*v1.Node) error {
	_, err := b.EnsureLoadBalancer(ctx, cluster, s, nodes)
	return err
}

func (b *balancers) EnsureLoadBalancerDeleted(_ context.Context, _ string, s *v1.Service) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.all[string(s.UID)]
	delete(b.all, string(s.UID))
	if l == nil || l.routed == "" {
		return nil
	}
	return ip("route del " + l.ip + "/32")
}

func (l *balancer) status() *v1.LoadBalancerStatus {
	return &v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{IP: l.ip}}}
}

// route checks the health of all nodes twice a second and updates the routes.
func (b *balancers) route(ctx context.Context) {
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for ticker := time.NewTicker(500 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		b.mu.Lock()
		now := map[string]balancer{} // a copy: the lock is not held during health checks
		for uid, l := range b.all {
			now[uid] = *l
		}
		b.mu.Unlock()
		for uid, l := range now {
			healthy := l.healthy(client)
			b.mu.Lock()
			// The load balancer may have been deleted or changed since the copy.
			if cur := b.all[uid]; cur != nil && cur.check == l.check {
				if err := cur.routeTo(healthy); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
			b.mu.Unlock()
		}
	}
}

// healthy returns the nodes that packets must be routed to.
func (l balancer) healthy(client *http.Client) []string {
	var healthy []string
	for _, n := range l.nodes {
		r, err := client.Get("http://" + n + l.check)
		if err != nil {
			continue
		}
		r.Body.Close()
		if r.StatusCode == http.StatusOK {
			healthy = append(healthy, n)
			if l.affinity { // all clients have the same address
				break
			}
		}
	}
	return healthy
}

func (l *balancer) routeTo(nodes []string) error {
	want := "dev lost"
	if len(nodes) > 0 {
		want = "src " + balancerClient + " nexthop via " + strings.Join(nodes, " nexthop via ")
	}
	if want == l.routed {
		return nil
	}
	if err := ip("route replace " + l.ip + "/32 " + want); err != nil {
		return err
	}
	l.routed = want
	fmt.Fprintf(os.Stderr, "load balancer %s: %s\n", l.ip, want)
	return nil
}
