//go:build !race

// The race detector finds a race within client-go 0.37 when it reads a certificate again:
// dynamicClientCert.loadClientCert writes what its worker reads.

package kubeapi

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/transport"
	componentbase "k8s.io/component-base/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// client-go's goroutine that reads client certificates reads this variable, and never ends.
func init() { transport.CertCallbackRefreshDuration = 50 * time.Millisecond }

func TestMain(m *testing.M) { netlab.Main(m) }

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	c := &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a := &authority{t: t, cert: c}
	der, key := a.sign(c)
	a.key, a.cert = key, must.Get(x509.ParseCertificate(der))(t)
	return a
}

// sign signs a certificate with a new key, which is the authority's own for the first one.
func (a *authority) sign(c *x509.Certificate) (der []byte, key *ecdsa.PrivateKey) {
	key = must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(a.t)
	if a.key == nil {
		a.key = key
	}
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	return must.Get(x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key))(a.t), key
}

func encoded(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// write writes the authority's own certificate.
func (a *authority) write(file string) { put(a.t, file, encoded("CERTIFICATE", a.cert.Raw)) }

// issue writes a certificate of an administrator and of the API server to file.crt, and its key to
// file.key.
func (a *authority) issue(file string) {
	der, key := a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}, IPAddresses: []net.IP{net.ParseIP(rotationAddress)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	})
	put(a.t, file+".crt", encoded("CERTIFICATE", der))
	put(a.t, file+".key", encoded("EC PRIVATE KEY", must.Get(x509.MarshalECPrivateKey(key))(a.t)))
}

// put replaces a file in one step.
func put(t *testing.T, file string, text []byte) {
	t.Helper()
	must.Do(t, os.WriteFile(file+".new", text, 0o600))
	must.Do(t, os.Rename(file+".new", file))
}

// follower follows the objects with its own kubeconfig and credentials.
type follower struct {
	label        atomic.Pointer[string] // of the Node
	refused      atomic.Pointer[string] // why the latest refused request was
	unauthorized atomic.Int64           // answers 401
}

// recording records what is refused.
type recording struct {
	*follower
	http.RoundTripper
}

func (r recording) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := r.RoundTripper.RoundTrip(req)
	why := ""
	switch {
	case err != nil:
		why = err.Error()
	case resp.StatusCode == http.StatusUnauthorized:
		why = "unauthorized"
		r.unauthorized.Add(1)
	}
	if why != "" {
		r.refused.Store(&why)
	}
	return resp, err
}

// followAs starts a follower with the user and the CA file of a kubeconfig.
func followAs(t *testing.T, h *netlab.Host, dir, ca, user string) *follower {
	t.Helper()
	kubeconfig := filepath.Join(dir, filepath.Base(ca)+".kubeconfig")
	put(t, kubeconfig, fmt.Appendf(nil, `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "https://%s:6443", certificate-authority: %s}}],
users: [{name: u, user: %s}], contexts: [{name: c, context: {cluster: c, user: u}}], current-context: c}`, rotationAddress, ca, user))
	c := must.Get(ClientConfig(componentbase.ClientConnectionConfiguration{Kubeconfig: kubeconfig, QPS: 1000, Burst: 1000}, ""))(t)
	c.Dial = func(ctx context.Context, network, to string) (net.Conn, error) { return h.Dial(ctx, network, "", to) }
	f := &follower{}
	c.Wrap(func(rt http.RoundTripper) http.RoundTripper { return recording{f, rt} })
	client := must.Get(NewClient(c))(t)
	if readsAuthorityAgain() {
		readAuthorityOften(t, client)
	}
	ctx, cancel := context.WithCancel(t.Context())
	g := apiretry.NewGroup(ctx, slog.New(slog.DiscardHandler))
	apiretry.Follow(g, apiretry.Source[*v1.Node]{
		Resource: "nodes", Name: "n1", Synced: func() {}, Gone: func(types.NamespacedName) {},
		Set:      func(n *v1.Node) { v := n.Labels["version"]; f.label.Store(&v) },
		Requests: func() (*cache.ListWatch, any) { return apiretry.Requests(client.Core, "nodes", ""), client.Core },
	})
	t.Cleanup(func() { cancel(); _ = g.Wait() })
	return f
}

// readsAuthorityAgain reports whether client-go reads the file of the CA again. It does since 1.36, as
// its reflectors have the option Backoff. Binaries of tests do not know the versions of their modules.
func readsAuthorityAgain() bool {
	_, ok := reflect.TypeFor[cache.ReflectorOptions]().FieldByName("Backoff")
	return ok
}

// readAuthorityOften makes client-go look at the file of the CA at each request, and not once in five
// minutes, which it has no variable for.
func readAuthorityOften(t *testing.T, c *Client) {
	t.Helper()
	for rt := c.Core.(*rest.RESTClient).Client.Transport; ; {
		if r, ok := rt.(recording); ok {
			rt = r.RoundTripper
		}
		if f := reflect.ValueOf(rt).Elem().FieldByName("caRefreshDuration"); f.IsValid() {
			*(*time.Duration)(unsafe.Pointer(f.UnsafeAddr())) = 0
			return
		}
		w, ok := rt.(utilnet.RoundTripperWrapper)
		if !ok {
			t.Fatalf("no transport that reads the file of the CA again, but %T", rt)
		}
		rt = w.WrappedRoundTripper()
	}
}

// rotationAddress is the API server's.
const rotationAddress = "10.0.0.2"

// TestRotatedCredentialsAreReadAgain follows a real API server with a token, with a client
// certificate, and with a CA. While the API server restarts, each of them becomes invalid. The
// followers go on after the files have been replaced.
func TestRotatedCredentialsAreReadAgain(t *testing.T) {
	h := netlab.NewHost(t)
	h.Addrs("lo", rotationAddress+"/32")
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	old, next := newAuthority(t), newAuthority(t)
	old.issue(at("server"))
	old.issue(at("client"))
	for _, name := range []string{"clients", "ca-of-the-third"} {
		old.write(at(name))
	}
	s := controlplane.New(t, controlplane.Config{
		Host: h, Address: rotationAddress,
		APIServerFlags: []string{"--client-ca-file=" + at("clients"), "--tls-cert-file=" + at("server.crt"), "--tls-private-key-file=" + at("server.key")},
	})
	do := func(method, path, body string) []byte {
		t.Helper()
		answer := must.Get(s.Request(t.Context(), method, path, []byte(body)))(t)
		return answer
	}
	// A token ends with the Secret that it is bound to.
	do("POST", "/api/v1/namespaces/default/serviceaccounts", `{"metadata": {"name": "proxy"}}`)
	do("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", `{"metadata": {"name": "proxy"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": [{"kind": "ServiceAccount", "name": "proxy", "namespace": "default"}]}`)
	token := func(secret string) []byte {
		t.Helper()
		do("POST", "/api/v1/namespaces/default/secrets", `{"metadata": {"name": "`+secret+`"}}`)
		var out struct{ Status struct{ Token string } }
		answer := do("POST", "/api/v1/namespaces/default/serviceaccounts/proxy/token", `{"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Secret", "name": "`+secret+`"}}}`)
		must.Do(t, json.Unmarshal(answer, &out))
		return []byte(out.Status.Token)
	}
	put(t, at("token"), token("first"))
	do("POST", "/api/v1/nodes", `{"metadata": {"name": "n1", "labels": {"version": "1"}}}`)

	// The first two trust both authorities.
	for _, name := range []string{"ca-of-the-first", "ca-of-the-second"} {
		put(t, at(name), append(encoded("CERTIFICATE", old.cert.Raw), encoded("CERTIFICATE", next.cert.Raw)...))
	}
	followers := map[string]*follower{
		"token":              followAs(t, h, dir, "ca-of-the-first", "{tokenFile: token}"),
		"client certificate": followAs(t, h, dir, "ca-of-the-second", "{client-certificate: client.crt, client-key: client.key}"),
		"CA":                 followAs(t, h, dir, "ca-of-the-third", "{token: admin-token}"),
	}
	if !readsAuthorityAgain() {
		delete(followers, "CA")
	}
	eventually := func(what string, done func(f *follower) bool) {
		t.Helper()
		for name, f := range followers {
			for end := time.Now().Add(2 * time.Minute); !done(f); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					why := "none"
					if w := f.refused.Load(); w != nil {
						why = *w
					}
					t.Fatalf("%s: never %s; the latest refusal: %s", name, what, why)
				}
			}
		}
	}
	has := func(version string) func(*follower) bool {
		return func(f *follower) bool { v := f.label.Load(); return v != nil && *v == version }
	}
	eventually("read the Node", has("1"))

	second := token("second")
	do("DELETE", "/api/v1/namespaces/default/secrets/first", "")
	s.Kill()
	next.issue(at("server"))
	next.write(at("clients"))
	must.Do(t, s.Run(t.Context()))
	do("PATCH", "/api/v1/nodes/n1", `{"metadata": {"labels": {"version": "2"}}}`)
	eventually("refused", func(f *follower) bool {
		why := f.refused.Load()
		return why != nil && (*why == "unauthorized" || strings.Contains(*why, "x509: "))
	})
	for name, f := range followers {
		if has("2")(f) {
			t.Errorf("%s: an old credential is accepted", name)
		}
	}
	before := followers["token"].unauthorized.Load()
	put(t, at("token"), second)
	next.issue(at("client"))
	next.write(at("ca-of-the-third"))
	eventually("read the change", has("2"))
	// A list and a watch may have been requested once more with the old token.
	if n := followers["token"].unauthorized.Load() - before; n > 2 {
		t.Errorf("%d requests with the old token since it was replaced", n)
	}
}
