package health_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// A node agent uses all parts. Here the data plane refuses a Service, which holds up neither the
// health checks of others nor /healthz.
func Example() {
	t, engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	plane := ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		failed := map[tracker.Key]error{}
		for _, c := range d.Changes {
			if c.Key.Name == "refused" {
				failed[c.Key] = errors.New("too large")
			}
		}
		if len(failed) != 0 {
			return &ruleset.PartialError{Failed: failed}
		}
		return nil
	})
	proxy, err := health.NewProxy(health.ProxyConfig{Timeout: time.Minute}) // twice the sync period
	if err != nil {
		fmt.Println(err)
		return
	}
	services := health.NewServices(health.ServicesConfig{ProxyHealthy: proxy.Healthy})
	ports := health.NewNodePorts(health.NodePortsConfig{Services: services, Listen: listenAnywhere})
	defer ports.Close(context.Background())
	rules := engine.Attach("plane", plane)
	checks := rules.Follow("health", ports)

	ctx, cancel := context.WithCancel(context.Background())
	r, err := runner.New(runner.Config{Hooks: proxy.Hooks()}, func(ctx context.Context) error {
		defer cancel() // this example ends after one run
		// Report endpoints to load balancers once they are in effect.
		return ruleset.SyncAll(ctx, rules, checks)
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	engine.Notify(r.Trigger)
	mux := http.NewServeMux()
	mux.Handle("/healthz", proxy.Healthz())
	mux.Handle("/livez", proxy.Livez())
	mux.Handle("/web", services.Handler(types.NamespacedName{Namespace: "shop", Name: "web"}, tracker.IPv4))
	ask := func(paths ...string) {
		var codes []any
		for _, path := range paths {
			w := httptest.NewRecorder()
			mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
			codes = append(codes, path, w.Code)
		}
		fmt.Println(codes...)
	}

	ask("/livez", "/healthz", "/web")
	refused := web()
	refused.Name, refused.Spec.ClusterIP, refused.Spec.ClusterIPs = "refused", "172.30.0.2", []string{"172.30.0.2"}
	refused.Spec.HealthCheckNodePort, refused.Spec.Ports[0].NodePort = 30083, 30082
	t.SetService(refused)
	r.Run(ctx)
	ask("/livez", "/healthz", "/web")
	proxy.SetIneligible("the autoscaler is about to remove the node")
	ask("/livez", "/healthz", "/web")
	// Output:
	// /livez 200 /healthz 503 /web 503
	// /livez 200 /healthz 200 /web 200
	// /livez 200 /healthz 503 /web 200
}

// listenAnywhere listens at a port that the kernel chooses, instead of a health-check node port.
func listenAnywhere(ctx context.Context, _, _ string) (net.Listener, error) {
	var c net.ListenConfig
	return c.Listen(ctx, "tcp4", "127.0.0.1:0")
}

// web is a Service with a health-check node port.
func web() *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: v1.ServiceSpec{
			Type:                  v1.ServiceTypeLoadBalancer,
			ClusterIP:             "172.30.0.1",
			ClusterIPs:            []string{"172.30.0.1"},
			IPFamilies:            []v1.IPFamily{v1.IPv4Protocol},
			Ports:                 []v1.ServicePort{{Port: 80, NodePort: 30080}},
			ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
			HealthCheckNodePort:   30081,
		},
	}
}

// webSlice has one endpoint of the Service, on a node.
func webSlice(node string) *discovery.EndpointSlice {
	name, port := "", int32(8080)
	return &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &name, Port: &port}},
		Endpoints:   []discovery.Endpoint{{Addresses: []string{"10.1.0.1"}, NodeName: &node}},
	}
}

// newEngine returns an engine for node-a that has the Service.
func newEngine() (*tracker.Tracker, *ruleset.Engine, error) {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		return nil, nil, err
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	t.SetService(web())
	t.SetSlice(webSlice("node-a"))
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return t, engine, err
}

// Serve a Service's health check without opening its port.
func ExampleServices() {
	t, engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	services := health.NewServices(health.ServicesConfig{})
	cursor := engine.Attach("health", services)
	handler := services.Handler(types.NamespacedName{Namespace: "shop", Name: "web"}, tracker.IPv4)
	for _, node := range []string{"node-a", "node-b"} {
		t.SetSlice(webSlice(node))
		if err := cursor.Sync(context.Background()); err != nil {
			fmt.Println(err)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		fmt.Print(w.Code, " ", w.Body)
	}
	// Output:
	// 200 {"service":{"namespace":"shop","name":"web"},"localEndpoints":1,"serviceProxyHealthy":true}
	// 503 {"service":{"namespace":"shop","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}
}

// Open the health-check node port of each Service. This example listens at a port that
// the kernel chooses; without Listen, NodePorts opens the Service's own port.
func ExampleNodePorts() {
	_, engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	var opened net.Listener
	ports := health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{}),
		Families: []tracker.Family{tracker.IPv4},
		Listen: func(ctx context.Context, network, address string) (net.Listener, error) {
			fmt.Println("listen", network, address)
			var c net.ListenConfig
			opened, err = c.Listen(ctx, network, "127.0.0.1:0")
			return opened, err
		},
	})
	ctx := context.Background()
	if err := engine.Attach("health", ports).Sync(ctx); err != nil {
		fmt.Println(err)
		return
	}
	r, err := http.Get("http://" + opened.Addr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	r.Body.Close()
	fmt.Println(r.Status, "weight", r.Header.Get("X-Load-Balancing-Endpoint-Weight"))
	fmt.Println("close:", ports.Close(ctx))
	// Output:
	// listen tcp4 0.0.0.0:30081
	// 200 OK weight 1
	// close: <nil>
}

// A node that is about to be removed gets no load-balancer traffic.
func ExampleWhyIneligible() {
	node := &v1.Node{}
	fmt.Printf("%q\n", health.WhyIneligible(node))
	node.Spec.Taints = []v1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}}
	fmt.Printf("%q\n", health.WhyIneligible(node))
	// Output:
	// ""
	// "the Node has the taint ToBeDeletedByClusterAutoscaler"
}
