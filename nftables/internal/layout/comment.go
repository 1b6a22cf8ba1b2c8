package layout

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// ServiceComment returns the comment of the elements of a Service port's frontends: the name alone, because Lookup,
// Ready and Traffic of other versions read it.
func ServiceComment(n tracker.ServicePortName) string { return n.String() }

// ParseServiceComment returns the Service port that a comment of ServiceComment names. The
// comment does not contain the protocol.
func ParseServiceComment(comment string, protocol v1.Protocol) tracker.ServicePortName {
	namespace, name, _ := strings.Cut(comment, "/")
	name, port, _ := strings.Cut(name, ":")
	return tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, Port: port, Protocol: protocol}
}
