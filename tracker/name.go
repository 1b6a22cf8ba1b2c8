package tracker

import (
	"cmp"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ServicePortName names one port of one Service: the identity under which
// Services and their endpoints meet. It is comparable.
type ServicePortName struct {
	types.NamespacedName
	// Port is the port's name; "" is the name of a Service's only, unnamed, port.
	Port string
	// Protocol is part of the identity: a Service may have the same port name
	// and number for TCP and for UDP.
	Protocol v1.Protocol
}

// String returns "namespace/name" or "namespace/name:port". As in kube-proxy
// the protocol is not part of it, so it names a port to a reader but is no key.
func (n ServicePortName) String() string {
	if n.Port == "" {
		return n.NamespacedName.String()
	}
	return n.NamespacedName.String() + ":" + n.Port
}

// Compare orders by namespace, name, port name and protocol.
func (n ServicePortName) Compare(o ServicePortName) int {
	return cmp.Or(
		strings.Compare(n.Namespace, o.Namespace),
		strings.Compare(n.Name, o.Name),
		strings.Compare(n.Port, o.Port),
		strings.Compare(string(n.Protocol), string(o.Protocol)),
	)
}

// Key names one port of one Service in one address family: a dual-stack Service
// has two keys for each of its ports. It is comparable.
type Key struct {
	ServicePortName
	// Family is IPv4 or IPv6.
	Family Family
}

// String returns "namespace/name:port/PROTOCOL/IPv4", unique for the key.
func (k Key) String() string {
	return k.ServicePortName.String() + "/" + string(k.Protocol) + "/" + k.Family.String()
}

// Compare orders as [ServicePortName.Compare] and then IPv4 before IPv6.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.ServicePortName.Compare(o.ServicePortName), cmp.Compare(k.Family, o.Family))
}
