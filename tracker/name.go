package tracker

import (
	"cmp"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/runner/complaint"
)

// ServicePortName names one port of one Service. It links Service ports to their
// endpoints. It is comparable.
type ServicePortName struct {
	types.NamespacedName
	// Port is the port's name. It is "" for the only port of a Service, if unnamed.
	Port string
	// Protocol is part of the name: a Service may use the same port name and number
	// for TCP and UDP.
	Protocol v1.Protocol
}

// String returns "namespace/name" or "namespace/name:port". As in kube-proxy it omits
// the protocol, so the text is not unique.
func (n ServicePortName) String() string {
	if n.Port == "" {
		return n.NamespacedName.String()
	}
	return n.NamespacedName.String() + ":" + n.Port
}

// Compare orders names by namespace, name, port name and protocol.
func (n ServicePortName) Compare(o ServicePortName) int {
	return cmp.Or(
		strings.Compare(n.Namespace, o.Namespace),
		strings.Compare(n.Name, o.Name),
		strings.Compare(n.Port, o.Port),
		strings.Compare(string(n.Protocol), string(o.Protocol)),
	)
}

// Key names one port of one Service in one address family. A dual-stack Service has
// two keys for each port. It is comparable.
type Key struct {
	ServicePortName
	// Family is IPv4 or IPv6.
	Family Family
}

// String returns "namespace/name:port/PROTOCOL/IPv4", which is unique for the key.
func (k Key) String() string {
	return k.ServicePortName.String() + "/" + string(k.Protocol) + "/" + k.Family.String()
}

// Object returns the Service port for messages, one for each Key.
func (k Key) Object() complaint.Object {
	return complaint.Object{Kind: "service", Namespace: k.Namespace, Name: k.Name, Part: k.Port,
		Suffix: "/" + string(k.Protocol) + "/" + k.Family.String()}
}

// Compare orders keys as [ServicePortName.Compare] does, then by family.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.ServicePortName.Compare(o.ServicePortName), cmp.Compare(k.Family, o.Family))
}
