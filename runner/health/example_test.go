package health_test

import (
	"context"
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

// Serve /healthz from the hooks that a runner would call.
func Example() {
	proxy, err := health.NewProxy(health.ProxyConfig{Timeout: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	hooks := proxy.Trace() // a runner gets it as runner.Config.Trace
	hooks.Queued(time.Now())
	hooks.SyncStart(runner.Info{})
	hooks.SyncDone(runner.Info{})

	healthz := func() int {
		w := httptest.NewRecorder()
		proxy.Healthz().ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
		return w.Code
	}
	fmt.Println(healthz())
	proxy.SetEligible(false) // the autoscaler is about to remove the node
	fmt.Println(healthz(), proxy.Healthy())
	// Output:
	// 200
	// 503 true
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
	engine, err := ruleset.NewEngine(ruleset.Config{Tracker: t})
	t.SetService(web())
	t.SetSlice(webSlice("node-a"))
	t.MarkSynced(tracker.SourceServices, tracker.SourceSlices, tracker.SourceNodes)
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
func ExampleEligible() {
	node := &v1.Node{}
	fmt.Println(health.Eligible(node))
	node.Spec.Taints = []v1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}}
	fmt.Println(health.Eligible(node))
	// Output:
	// true
	// false
}
