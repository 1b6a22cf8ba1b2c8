package objects

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
	netutils "k8s.io/utils/net"

	"github.com/go-proxier/proxier/endpointslice"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/must"
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
		must.Do(t, os.WriteFile(file, []byte(text), 0o600))
		cfg := configtest.Parsed(t, []string{"run", "--kubeconfig", file})
		_, client, err := NewSource(cfg, nil, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		got := FindAPIAddresses(t.Context(), client, slog.New(slog.DiscardHandler))
		if !slices.Contains(got, netip.MustParseAddrPort(c.want)) {
			t.Errorf("%s: %v, want %s", c.server, got, c.want)
		}
	}
	if got := FindAPIAddresses(t.Context(), nil, slog.New(slog.DiscardHandler)); got != nil {
		t.Errorf("with manifests: %v", got)
	}
}

// TestServiceCannotTakeAPIServersAddress gives a Service the API server's address as an external IP.
// Its other frontends are served.
func TestServiceCannotTakeAPIServersAddress(t *testing.T) {
	events := eventMessages{}
	w, _, _, _ := newWorld(t, WorldHooks{APIServer: apiAddresses{netip.MustParseAddrPort("192.0.2.7:6443")}, Events: events})
	w.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "thief"},
		Spec: v1.ServiceSpec{
			ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, ExternalIPs: []string{"192.0.2.7", "192.0.2.8"},
			Ports: []v1.ServicePort{
				{Name: "api", Protocol: v1.ProtocolTCP, Port: 6443}, {Name: "udp", Protocol: v1.ProtocolUDP, Port: 6443}, {Name: "web", Protocol: v1.ProtocolTCP, Port: 80},
			},
		},
	})
	var got []string
	for _, s := range w.Engine.Snapshot().Ports {
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
	if warnings := events["Service"]; len(warnings) != 1 || !strings.Contains(warnings[0], "API server") {
		t.Errorf("events %q, want one about the API server", events)
	}
}

// FuzzAddr compares ParseAddr with the parser that kube-proxy uses for the addresses of
// objects.
func FuzzAddr(f *testing.F) {
	for _, s := range []string{
		"10.0.0.1", "010.000.1.2", "::ffff:1.2.3.4", "::ffff:01.2.3.4", "fe80::1%eth0", "fe80::01%eth0", "1.2.3", "::1.2.3.4", "1::",
		"0:0:0:0:0:ffff:1.2.3.4", "0000000001.2.3.4", "2001:db8::00001", "2001:0000db8::0000", "::00", "00::00", ":", "::", "", "0", "00",
		"1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::2:3:4:5:6:7:8", "000ffff::", "010000::", "1.2.3.256", "1.2.3.0256", "0x1::", "1.2.3.4.", ".1.2.3.4",
		"1:2:3:4:5:6:1.2.3.4", "1:2:3:4:5:6:7:1.2.3.4", "::a.2.3.4", "::0a.2.3.4", "1.2.3.0a", "00000:00000::00A", "::1.2.3.4:5", "+1.2.3.4", "1.2.3.4/8", " ::1",
		strings.Repeat("0", 1000) + "1::", "::" + strings.Repeat("0", 1000),
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := endpointslice.ParseAddr(s)
		ip := netutils.ParseIPSloppy(s)
		if (err == nil) != (ip != nil) {
			t.Fatalf("%q: %v, %v; upstream: %v", s, a, err, ip)
		}
		if u, _ := netip.AddrFromSlice(ip); u.Unmap() != a {
			t.Fatalf("%q: %v; upstream: %v", s, a, u)
		}
	})
}
