//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// watch receives the same changes of EndpointSlices as the proxy, and does nothing else with
// them. A change cannot be in effect before the API server has sent it, so the watch separates
// the API server's part of a latency from the proxy's.
type watch struct {
	events apiwatch.Interface
	ended  chan struct{}

	mu     sync.Mutex
	latest map[int]received // by Service
	// changed is closed and replaced when latest changes.
	changed chan struct{}
}

// received is the last change that the API server sent for a Service.
type received struct {
	set  int
	when time.Time
}

// watch starts a watch. The caller must call end.
func (c *control) watch(ctx context.Context) (*watch, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.server.Kubeconfig())
	if err != nil {
		return nil, err
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
		return c.host.Dial(ctx, network, "", to)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	endpointSlices := client.DiscoveryV1().EndpointSlices("default")
	first, err := endpointSlices.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil, err
	}
	w := &watch{ended: make(chan struct{}), latest: map[int]received{}, changed: make(chan struct{})}
	if w.events, err = endpointSlices.Watch(ctx, metav1.ListOptions{ResourceVersion: first.ResourceVersion}); err != nil {
		return nil, err
	}
	go w.receive()
	return w, nil
}

func (w *watch) end() {
	w.events.Stop()
	<-w.ended
}

// receive stores the time at which each change arrives until the watch ends.
func (w *watch) receive() {
	defer close(w.ended)
	for e := range w.events.ResultChan() {
		now := time.Now()
		s, ok := e.Object.(*discovery.EndpointSlice)
		if !ok || len(s.Endpoints) == 0 {
			continue
		}
		a, err := netip.ParseAddr(s.Endpoints[0].Addresses[0])
		if err != nil {
			continue
		}
		service, set := setOf(a)
		w.mu.Lock()
		w.latest[service] = received{set, now}
		close(w.changed)
		w.changed = make(chan struct{})
		w.mu.Unlock()
	}
}

// when returns the time at which the Service's last change arrived. It waits for the change if
// the watch is late.
func (w *watch) when(ctx context.Context, service, set int) (time.Time, error) {
	timeout := time.NewTimer(changeTimeout)
	defer timeout.Stop()
	for {
		w.mu.Lock()
		r, changed := w.latest[service], w.changed
		w.mu.Unlock()
		if !r.when.IsZero() && r.set == set {
			return r.when, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return time.Time{}, ctx.Err()
		case <-w.ended:
			return time.Time{}, fmt.Errorf("the watch of rival's own ended")
		case <-timeout.C:
			return time.Time{}, fmt.Errorf("a change of service %d did not reach rival's own watch within %s", service, changeTimeout)
		}
	}
}
