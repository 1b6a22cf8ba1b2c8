package kubeapi

import (
	"net/url"

	"k8s.io/client-go/rest"
)

// FromREST returns a Client that uses another client's connections. The arguments are the REST clients
// of the API groups "" (the core), discovery.k8s.io and networking.k8s.io, such as those of client-go's
// clientset:
//
//	kubeapi.FromREST(cs.CoreV1().RESTClient(), cs.DiscoveryV1().RESTClient(), cs.NetworkingV1().RESTClient())
func FromREST(core, discovery, networking rest.Interface) *Client {
	return &Client{core: core, discovery: discovery, networking: networking}
}

// Close closes all connections of a Client that NewClient returned. A request that runs fails.
func (c *Client) Close() {
	if c.connections != nil {
		c.connections.CloseAll()
	}
}

// URL returns the address of the API server.
func (c *Client) URL() *url.URL { return c.core.Get().URL() }
