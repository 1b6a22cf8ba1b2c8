package informers_test

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/go-proxier/proxier/examples/informers"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// feed runs Feed on the clock of package synctest until the test ends. It returns the engine, and what the
// hooks received.
func feed(t *testing.T, client *fake.Clientset, log *slog.Logger) (*ruleset.Engine, func() []string) {
	tr := must.Get(tracker.New(tracker.Config{}))(t)
	engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr}))(t)
	var mu sync.Mutex
	var received []string
	receive := func(what string, update func() bool) {
		mu.Lock()
		defer mu.Unlock()
		if update() {
			what += " differs"
		}
		received = append(received, what)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- informers.Feed(ctx, informers.Config{
			Client: client, Tracker: tr, Node: "here", Engine: engine, Log: log,
			ReceiveService: func(n types.NamespacedName, update func() bool) { receive(n.String(), update) },
			ReceiveSlice:   receive,
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	time.Sleep(time.Second)
	synctest.Wait()
	return engine, func() []string {
		time.Sleep(time.Second)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		slices.Sort(received)
		return slices.Clone(received)
	}
}

func serviceCIDR(name string, ranges ...string) *networking.ServiceCIDR {
	return &networking.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networking.ServiceCIDRSpec{CIDRs: ranges}}
}

func TestServiceCIDRsReachTheEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(serviceCIDR("kubernetes", "10.96.0.0/16", "fd00::/112", "x"))
		engine, wait := feed(t, client, nil)
		has := func(want ...string) {
			t.Helper()
			wait()
			var got []string
			for _, p := range engine.Snapshot().Node.ServiceCIDRs {
				got = append(got, p.String())
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("ranges %v, want %v", got, want)
			}
		}
		has("10.96.0.0/16", "fd00::/112")
		api := client.NetworkingV1().ServiceCIDRs()
		must.Get(api.Create(t.Context(), serviceCIDR("more", "10.97.0.0/16"), metav1.CreateOptions{}))(t)
		has("10.96.0.0/16", "10.97.0.0/16", "fd00::/112")
		must.Do(t, api.Delete(t.Context(), "kubernetes", metav1.DeleteOptions{}))
		has("10.97.0.0/16")
	})
}

// TestServerWithoutServiceCIDRs has an API server that answers 404 about them for an hour.
func TestServerWithoutServiceCIDRs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(service("web", "10.96.0.1"), serviceCIDR("kubernetes", "10.96.0.0/16"))
		var present atomic.Bool
		client.PrependReactor("list", "servicecidrs", func(clienttesting.Action) (bool, runtime.Object, error) {
			return !present.Load(), nil, apierrors.NewNotFound(schema.GroupResource{Resource: "servicecidrs"}, "")
		})
		var log strings.Builder // every goroutine waits while the test reads it
		engine, wait := feed(t, client, slog.New(slog.NewTextHandler(&log, nil)))
		time.Sleep(time.Hour)
		wait()
		if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "cannot read ServiceCIDRs") {
			t.Errorf("%d lines in an hour, want one about ServiceCIDRs:\n%s", n, log.String())
		}
		if s := engine.Snapshot(); len(s.Ports) != 1 || len(s.Node.ServiceCIDRs) != 0 {
			t.Errorf("%d Service ports and ranges %v", len(s.Ports), s.Node.ServiceCIDRs)
		}
		present.Store(true)
		time.Sleep(15 * time.Minute)
		wait()
		if got := engine.Snapshot().Node.ServiceCIDRs; !slices.Equal(got, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}) {
			t.Errorf("ranges %v after the API server was upgraded", got)
		}
	})
}

func TestReceivedObjectsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(service("web", "10.96.0.1"), slice("web", "10.0.0.1", "here"))
		_, received := feed(t, client, nil)
		if got, want := received(), []string{"IPv4 differs", "ns/web differs"}; !slices.Equal(got, want) {
			t.Errorf("received %q, want %q", got, want)
		}
		same := service("web", "10.96.0.1")
		same.Annotations = map[string]string{"a": "b"}
		must.Get(client.CoreV1().Services("ns").Update(t.Context(), same, metav1.UpdateOptions{}))(t)
		must.Do(t, client.DiscoveryV1().EndpointSlices("ns").Delete(t.Context(), "web-1", metav1.DeleteOptions{}))
		if got, want := received(), []string{" differs", "IPv4 differs", "ns/web", "ns/web differs"}; !slices.Equal(got, want) {
			t.Errorf("received %q, want %q", got, want)
		}
	})
}
