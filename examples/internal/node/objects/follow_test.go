package objects

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestEmptySourcesAreReported lists no Node but another one, which appears after an hour, and everything else.
func TestEmptySourcesAreReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		meta := metav1.ObjectMeta{Namespace: "ns", Name: "web", Labels: map[string]string{discovery.LabelServiceName: "web"}}
		client := fake.NewClientset(web("web", "10.96.0.1"), &discovery.EndpointSlice{ObjectMeta: meta, AddressType: discovery.AddressTypeIPv4}, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}})
		reason := "none"
		w, log, _, _ := newWorld(t, WorldHooks{Ineligible: func(r string) { reason = r }})
		ctx, cancel := context.WithCancel(t.Context())
		factory := informers.NewSharedInformerFactory(client, 0)
		core := factory.Core().V1()
		in := Informers{Services: core.Services().Informer(), Slices: factory.Discovery().V1().EndpointSlices().Informer(), Nodes: core.Nodes().Informer()}
		ended := make(chan error)
		go func() { ended <- w.Follow(ctx, nil, in) }()
		time.Sleep(time.Minute) // nothing is listed
		synctest.Wait()
		if reason != "none" {
			t.Errorf("not eligible because of %q before Nodes are listed", reason)
		}
		factory.Start(ctx.Done())
		time.Sleep(time.Hour)
		synctest.Wait()
		const want = `there is no Node named "n1", a name from --hostname-override`
		if !strings.HasPrefix(reason, want) {
			t.Errorf("not eligible because of %q", reason)
		}
		if n, lines := strings.Count(log.String(), strings.ReplaceAll(want, `"`, `\"`)), strings.Count(log.String(), "\n"); n < 5 || n > 15 || lines != n {
			t.Errorf("%d lines, %d of them about the Node, in an hour:\n%s", lines, n, log)
		}
		must.Get(client.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{}))(t)
		time.Sleep(time.Second)
		synctest.Wait()
		log.Reset()
		time.Sleep(time.Hour)
		synctest.Wait()
		if log.Len() != 0 || reason != "" {
			t.Errorf("after the Node appeared: not eligible because of %q, log:\n%s", reason, log)
		}
		cancel()
		<-ended
		factory.Shutdown()
	})
}

// TestCommandsReadAllObjects counts requests with a selector: those of a command also have the objects that the proxy
// leaves out.
func TestCommandsReadAllObjects(t *testing.T) {
	for _, keep := range []bool{false, true} {
		asked := make(chan bool, 100)
		cfg := standIn(t, func(p string) bool {
			return strings.HasSuffix(p, "/services") || strings.HasSuffix(p, "/endpointslices")
		},
			func(_ http.ResponseWriter, r *http.Request) { asked <- strings.Contains(r.URL.RawQuery, "Selector") })
		src, _, err := NewSource(cfg, nil, slog.New(slog.DiscardHandler))
		must.Do(t, err)
		t.Cleanup(src.Close)
		w := must.Get(New(cfg, nil, nil, WorldHooks{Keep: keep}, slog.New(slog.DiscardHandler)))(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- src.Follow(ctx, w) }()
		for range 2 {
			if restricted := <-asked; restricted == keep {
				t.Errorf("Keep is %v, and the request has a selector: %v", keep, restricted)
			}
		}
		cancel()
		<-ended
	}
}
