package informers_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientinformers "k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/go-proxier/proxier/examples/informers"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// timeout bounds each wait.
const timeout = time.Minute

func service(name, ip string) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec:       v1.ServiceSpec{ClusterIP: ip, Ports: []v1.ServicePort{{Port: 80}}},
	}
}

func slice(name, addr, node string) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name + "-1", Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
		Endpoints:   []discovery.Endpoint{{Addresses: []string{addr}, NodeName: &node}},
	}
}

func node(name string) *v1.Node {
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelTopologyZone: "z1"}},
		Status:     v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}},
	}
}

// world is a tracker that Feed feeds from a fake API server.
type world struct {
	t       *testing.T
	client  *fake.Clientset
	tracker *tracker.Tracker
	engine  *ruleset.Engine
}

func newWorld(t *testing.T, objects ...runtime.Object) *world {
	w := &world{t: t, client: fake.NewClientset(objects...)}
	var err error
	if w.tracker, err = tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}); err != nil {
		t.Fatal(err)
	}
	if w.engine, err = ruleset.NewEngine(ruleset.Config{Source: w.tracker}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		done <- informers.Feed(ctx, informers.Config{Client: w.client, Tracker: w.tracker, Node: "here"})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Feed returned %v", err)
		}
	})
	return w
}

// until waits for a condition.
func (w *world) until(what string, f func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(timeout); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not within %v", what, timeout)
		}
	}
}

// services returns the ruleset's Services as "name: endpoints, local ones".
func (w *world) services() map[string]string {
	out := map[string]string{}
	for _, s := range w.engine.Snapshot().Ports {
		local := 0
		for _, e := range s.Endpoints {
			if e.IsLocal(w.tracker.Node().Name) {
				local++
			}
		}
		out[s.Key.Name] = fmt.Sprintf("%d endpoints, %d local", len(s.Endpoints), local)
	}
	return out
}

func TestTrackerFollowsObjects(t *testing.T) {
	w := newWorld(t, service("web", "10.96.0.1"), slice("web", "10.0.0.1", "here"), node("here"), node("there"))
	w.until("synced", w.tracker.Synced)
	w.until("web", func() bool { return w.services()["web"] == "1 endpoints, 1 local" })
	if n := w.tracker.Node(); n.Name != "here" || n.Zone != "z1" || len(n.Addresses) != 1 {
		t.Errorf("node %+v", n)
	}
	ctx := t.Context()
	if _, err := w.client.CoreV1().Services("ns").Create(ctx, service("api", "10.96.0.2"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.until("api", func() bool { return w.services()["api"] == "0 endpoints, 0 local" })
	if _, err := w.client.DiscoveryV1().EndpointSlices("ns").Update(ctx, slice("web", "10.0.0.2", "there"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.until("the other endpoint", func() bool { return w.services()["web"] == "1 endpoints, 0 local" })
	must.Do(t, w.client.DiscoveryV1().EndpointSlices("ns").Delete(ctx, "web-1", metav1.DeleteOptions{}))
	w.until("no endpoint", func() bool { return w.services()["web"] == "0 endpoints, 0 local" })
	must.Do(t, w.client.CoreV1().Services("ns").Delete(ctx, "web", metav1.DeleteOptions{}))
	w.until("no web", func() bool { return len(w.services()) == 1 })
}

func TestEndpointsStayLocalWithoutNode(t *testing.T) {
	w := newWorld(t, service("web", "10.96.0.1"), slice("web", "10.0.0.1", "here"), node("here"), node("there"))
	w.until("synced", w.tracker.Synced)
	must.Do(t, w.client.CoreV1().Nodes().Delete(t.Context(), "here", metav1.DeleteOptions{}))
	w.until("the node has a name alone", func() bool { return w.tracker.Node().Equal(tracker.NodeInfo{Name: "here"}) })
	if got := w.services()["web"]; got != "1 endpoints, 1 local" {
		t.Errorf("web has %s", got)
	}
	if _, err := w.client.CoreV1().Nodes().Create(t.Context(), node("here"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.until("the Node is back", func() bool { return w.tracker.Node().Zone == "z1" })
}

func Example() {
	client := fake.NewClientset(service("web", "10.96.0.1"), node("here"))
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	changed := make(chan struct{}, 1)
	t.Notify(func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: "here"}) }()
	for !t.Synced() {
		<-changed
	}
	for _, u := range t.Take().Updates {
		fmt.Println(u.Name, len(u.Ports))
	}
	cancel()
	fmt.Println(<-done)
	// Output:
	// ns/web 1
	// context canceled
}

// TestInformersOfTheProgramAreUsed gives Feed the informers of a factory that another consumer
// uses, too. They hold a Service that the tracker's Selector leaves out, and stay when Feed ends.
func TestInformersOfTheProgramAreUsed(t *testing.T) {
	other := service("other", "10.96.0.2")
	other.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "another"}
	client := fake.NewClientset(service("web", "10.96.0.1"), other, slice("web", "10.0.0.1", "here"), node("here"))
	factory := clientinformers.NewSharedInformerFactory(client, 0)
	services := factory.Core().V1().Services().Informer()
	c := informers.Config{
		Services: services, Slices: factory.Discovery().V1().EndpointSlices().Informer(), Nodes: factory.Core().V1().Nodes().Informer(), Node: "here",
	}
	factory.Start(t.Context().Done())
	var was *tracker.Tracker
	for range 2 { // the second Feed finds informers that have synced
		var err error
		if c.Tracker, err = tracker.New(tracker.Config{}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- informers.Feed(ctx, c) }()
		for end := time.Now().Add(timeout); !c.Tracker.Synced(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("the tracker is not synced")
			}
		}
		updates := c.Tracker.Take().Updates
		if len(updates) != 1 || updates[0].Name.Name != "web" || len(updates[0].Ports[0].Endpoints) != 1 {
			t.Errorf("updates %v, want those of web alone", updates)
		}
		if got := c.Tracker.Node().Zone; got != "z1" {
			t.Errorf("zone %q, want z1", got)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Feed returned %v", err)
		}
		if services.IsStopped() {
			t.Fatal("the program's informer was stopped")
		}
		// The handler of the first Feed is gone: its tracker hears of no new Service.
		if was != nil {
			if _, err := client.CoreV1().Services("ns").Create(t.Context(), service("late", "10.96.0.3"), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(timeout); len(services.GetStore().ListKeys()) != 3; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("the informer does not see the new Service")
				}
			}
			time.Sleep(20 * time.Millisecond)
			if got := was.Take().Updates; len(got) != 0 {
				t.Errorf("a tracker got %v after its Feed had returned", got)
			}
		}
		was = c.Tracker
	}
}
