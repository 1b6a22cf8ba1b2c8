package main

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/tracker"
)

func TestAPIServerAddressComesFromConfiguration(t *testing.T) {
	for _, c := range []struct{ server, want string }{
		{"https://192.0.2.7:6443", "192.0.2.7:6443"},
		{"https://192.0.2.7", "192.0.2.7:443"},
		{"https://[2001:db8::7]:6443", "[2001:db8::7]:6443"},
		{"http://localhost:8080", "127.0.0.1:8080"},
	} {
		file := filepath.Join(t.TempDir(), "kubeconfig")
		text := `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "` + c.server + `"}}], contexts: [{name: c, context: {cluster: c}}], current-context: c}`
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := parse(newFlags("run", "", t.Output()), []string{"--kubeconfig", file}, 0)
		if err != nil {
			t.Fatal(err)
		}
		got := findAPIAddresses(t.Context(), cfg, slog.New(slog.DiscardHandler))
		if !slices.Contains(got, netip.MustParseAddrPort(c.want)) {
			t.Errorf("%s: %v, want %s", c.server, got, c.want)
		}
	}
	if got := findAPIAddresses(t.Context(), &config.Config{Manifests: "x"}, slog.New(slog.DiscardHandler)); got != nil {
		t.Errorf("with manifests: %v", got)
	}
}

// TestServiceCannotTakeAPIServersAddress gives a Service the API server's address as an external IP.
// Its other frontends are served.
func TestServiceCannotTakeAPIServersAddress(t *testing.T) {
	var warnings eventList
	cfg, err := parse(newFlags("run", "", t.Output()), []string{"--manifests", t.TempDir()}, 0)
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorld(cfg, []tracker.Family{tracker.IPv4}, nil, worldHooks{
		apiServer: apiAddresses{netip.MustParseAddrPort("192.0.2.7:6443")},
		events:    &warnings,
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w.setService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "thief"},
		Spec: v1.ServiceSpec{
			ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, ExternalIPs: []string{"192.0.2.7", "192.0.2.8"},
			Ports: []v1.ServicePort{
				{Name: "api", Protocol: v1.ProtocolTCP, Port: 6443}, {Name: "udp", Protocol: v1.ProtocolUDP, Port: 6443}, {Name: "web", Protocol: v1.ProtocolTCP, Port: 80},
			},
		},
	})
	w.tracker.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
	var got []string
	for _, s := range w.engine.Snapshot().Services {
		for _, f := range s.Frontends {
			if f.Addr.String() != "10.96.0.1" {
				got = append(got, s.Key.Port+" "+f.Addr.String())
			}
		}
	}
	slices.Sort(got)
	if want := []string{"api 192.0.2.8", "udp 192.0.2.7", "udp 192.0.2.8", "web 192.0.2.7", "web 192.0.2.8"}; !slices.Equal(got, want) {
		t.Errorf("external IPs %q, want %q", got, want)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "API server") {
		t.Errorf("events %q, want one about the API server", warnings)
	}
}

// eventList holds the messages of events.
type eventList []string

func (l *eventList) Event(_ v1.ObjectReference, _ bool, _, message string) { *l = append(*l, message) }
