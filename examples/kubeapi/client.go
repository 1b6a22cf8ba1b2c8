package kubeapi

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/connrotation"
	componentbase "k8s.io/component-base/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/textfile"
)

// dialTimeout bounds one attempt to connect to the API server. The default of client-go, 30
// seconds, makes a node late: the kernel repeats an attempt that got no answer after 1, 3, 7
// and 15 seconds.
const dialTimeout = 4 * time.Second

// ClientConfig returns a client configuration for the API server. It reads the kubeconfig
// file that c names; a non-empty master overrides the server's URL. Without both it returns
// the configuration of the ServiceAccount of the pod in which the process runs.
//
// Clients of the configuration read the files of its credentials again: a token after an answer 401 and at least once a
// minute, a CA once in five minutes (since client-go 1.36), and a client certificate for each new connection and at
// least once in five minutes. The token is in WrapTransport, not in the fields of the configuration. ClientConfig reads
// the content of the kubeconfig once.
func ClientConfig(c componentbase.ClientConnectionConfiguration, master string) (*rest.Config, error) {
	var out *rest.Config
	var err error
	if c.Kubeconfig == "" && master == "" {
		if out, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("cannot find an API server: no --manifests, --kubeconfig or --master, and not in a pod: %w", err)
		}
	} else if err = textfile.CheckConfig(c.Kubeconfig); err != nil {
		return nil, err
	} else if out, err = clientcmd.BuildConfigFromFlags(master, c.Kubeconfig); err != nil {
		return nil, err
	}
	if err = textfile.CheckConfig(out.BearerTokenFile, out.CAFile, out.CertFile, out.KeyFile); err != nil {
		return nil, err
	}
	out.QPS, out.Burst = c.QPS, int(c.Burst)
	out.ContentType, out.AcceptContentTypes = c.ContentType, c.AcceptContentTypes
	if out.AcceptContentTypes == "" && c.ContentType != "" && c.ContentType != runtime.ContentTypeJSON {
		out.AcceptContentTypes = c.ContentType + "," + runtime.ContentTypeJSON
	}
	out.Dial = dialOf(out)
	out.UserAgent = rest.DefaultKubernetesUserAgent()
	if out.BearerTokenFile != "" {
		// client-go alone reads the file once a minute, and goes on with a token that is refused.
		out.Wrap(transport.ResettableTokenSourceWrapTransport(transport.NewCachedFileTokenSource(out.BearerTokenFile)))
		out.BearerToken, out.BearerTokenFile = "", ""
	}
	return out, nil
}

// Client is a client of the API groups that a node's proxy needs. [NewClient] makes one. A program with a clientset of
// client-go fills the fields, with CoreV1().RESTClient(), for example, and the Client uses the connections of the
// clientset. The methods are safe for concurrent use.
type Client struct {
	// The groups are "" (the core), discovery.k8s.io and networking.k8s.io.
	Core, Discovery, Networking rest.Interface
	// connections is nil if NewClient did not make the Client.
	connections *connrotation.Dialer
}

// NewClient returns a Client. The first request connects it.
func NewClient(c *rest.Config) (*Client, error) {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1.AddToScheme, discovery.AddToScheme, networking.AddToScheme} {
		if err := add(s); err != nil {
			return nil, err
		}
	}
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	out := &Client{connections: connrotation.NewDialer(connrotation.DialFunc(dialOf(c)))}
	c = rest.CopyConfig(c)
	c.Dial = out.connections.DialContext
	// With one HTTP client all groups share one connection.
	hc, err := rest.HTTPClientFor(c)
	if err != nil {
		return nil, err
	}
	for _, g := range []struct {
		to   *rest.Interface
		gv   schema.GroupVersion
		path string
	}{
		{&out.Core, v1.SchemeGroupVersion, "/api"}, {&out.Discovery, discovery.SchemeGroupVersion, "/apis"}, {&out.Networking, networking.SchemeGroupVersion, "/apis"},
	} {
		c := rest.CopyConfig(c)
		c.GroupVersion, c.APIPath = &g.gv, g.path
		c.NegotiatedSerializer = serializer.NewCodecFactory(s).WithoutConversion()
		if *g.to, err = rest.RESTClientForConfigAndClient(c, hc); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// dialOf returns the function that connects to the API server.
func dialOf(c *rest.Config) func(ctx context.Context, network, address string) (net.Conn, error) {
	if c.Dial != nil {
		return c.Dial
	}
	return (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext
}

// requestTimeout bounds a request about one object.
const requestTimeout = 20 * time.Second

// Node reads a Node. It waits for the API server for 20 seconds at most.
func (c *Client) Node(ctx context.Context, name string) (*v1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	out := &v1.Node{}
	err := c.Core.Get().Resource("nodes").Name(name).MaxRetries(0).Do(ctx).Into(out)
	return out, err
}

// RemoveTaint removes the taints with a key from a Node. n is a version of the Node; if
// it has no such taint, RemoveTaint does nothing. The error is the API server's, with the
// reason Invalid if the Node's taints differ from n's. RemoveTaint needs the right to
// patch the Node, and changes nothing else in it. It waits for the API server for 20
// seconds at most.
func (c *Client) RemoveTaint(ctx context.Context, n *v1.Node, key string) error {
	var patch []string
	for i := len(n.Spec.Taints) - 1; i >= 0; i-- { // an index stays valid if later ones are removed first
		if n.Spec.Taints[i].Key == key {
			patch = append(patch, fmt.Sprintf(`{"op":"test","path":"/spec/taints/%d/key","value":%q},{"op":"remove","path":"/spec/taints/%[1]d"}`, i, key))
		}
	}
	if len(patch) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return c.Core.Patch(types.JSONPatchType).Resource("nodes").Name(n.Name).Body([]byte("[" + strings.Join(patch, ",") + "]")).Do(ctx).Error()
}

// Close closes all connections of a Client that NewClient returned. Running requests fail.
func (c *Client) Close() {
	if c.connections != nil {
		c.connections.CloseAll()
	}
}

// URL returns the address of the API server.
func (c *Client) URL() *url.URL { return c.Core.Get().URL() }
