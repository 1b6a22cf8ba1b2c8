package kubeapi

import (
	utilnet "k8s.io/apimachinery/pkg/util/net"
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

// Close closes the idle connections of a Client that NewClient returned. The Client can be used again.
func (c *Client) Close() {
	if c.http != nil {
		utilnet.CloseIdleConnectionsFor(c.http.Transport)
	}
}
