package inspect

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// TestExplainAllNamesTheOwnerOfAFrontend has two Services with the same external IP and node port.
// The older one has them.
func TestExplainAllNamesTheOwnerOfAFrontend(t *testing.T) {
	w := newWorld()
	w.service.Spec.Type, w.service.Spec.ExternalIPs, w.service.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, []string{"192.0.2.1"}, 30080
	old := w.service.DeepCopy()
	old.Name, old.CreationTimestamp, old.Spec.ClusterIP, old.Spec.ClusterIPs = "old", metav1.Unix(1, 0), "10.96.0.2", []string{"10.96.0.2"}
	w.more = []*v1.Service{old}
	_, all := w.explain(t, "10.96.0.1:80")
	for _, want := range []string{
		"shop/web:http/TCP/IPv4: external IP 192.0.2.1:80 belongs to shop/old:http/TCP/IPv4 (ProxyFrontendConflict)\n",
		"shop/web:http/TCP/IPv4: node port 30080 belongs to shop/old:http/TCP/IPv4 (ProxyFrontendConflict)\n",
		"2 Services, 2 ports: 1 cannot work, 2 frontends lost to other Services\n",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in\n%s", want, all)
		}
	}
}

// TestExplainAllGivesTheReasonFromTheSlices has a Service for each reason, and two that work.
func TestExplainAllGivesTheReasonFromTheSlices(t *testing.T) {
	no, other := false, "web"
	app := map[string]string{"app": "web"}
	for name, c := range map[string]struct {
		edit func(*world)
		want string // "" for a Service that works
	}{
		"works": {func(*world) {}, ""},
		"ready": {func(w *world) { w.slice.Endpoints[0].Conditions.Ready = new(true) }, ""},
		"selector": {func(w *world) {
			w.service.Spec.Selector = map[string]string{"app": "wbe"}
			w.slice.Ports, w.slice.Endpoints = nil, nil
		}, "its selector app=wbe matches no pod"},
		"no slice":    {func(w *world) { w.service.Spec.Selector = app; w.slice.Labels[discovery.LabelServiceName] = "x" }, "it has no EndpointSlice: the controller"},
		"no selector": {func(w *world) { w.slice.Labels[discovery.LabelServiceName] = "x" }, "it has no selector, and no EndpointSlice"},
		"unready":     {func(w *world) { w.slice.Endpoints[0].Conditions.Ready = &no }, "1 of its 1 endpoint is not ready: a readiness probe fails"},
		"named port": {func(w *world) {
			w.service.Spec.Selector, w.service.Spec.Ports[0].TargetPort, w.slice.Ports = app, intstr.FromString("htpp"), nil
		}, `no container port of its 1 endpoint is named "htpp"`},
		"another port": {func(w *world) { w.slice.Ports[0].Name = &other }, `its EndpointSlices have the ports "web"/TCP, and not "http"/TCP`},
	} {
		w := newWorld()
		headless := w.service.DeepCopy()
		headless.Name, headless.Spec.ClusterIP, headless.Spec.ClusterIPs = "headless", v1.ClusterIPNone, nil
		w.more = []*v1.Service{headless}
		c.edit(w)
		want := "1 Service, 1 port: all have endpoints\n"
		if c.want != "" {
			want = "shop/web:http/TCP/IPv4: has no endpoints on any node: " + c.want
		}
		if _, all := w.explain(t, "10.96.0.1:80"); !strings.HasPrefix(all, want) {
			t.Errorf("%s:\n%s\nwant %q", name, all, want)
		}
	}
}
