package winkernel

import (
	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// PreserveDestination is an annotation of a Service. The value "true" sends connections to
// node ports and load-balancer IPs to pods of this node only, which see the load-balancer IP
// as the destination. The name is kube-proxy's on Windows.
const PreserveDestination = "preserve-destination"

// preserve is the extension of a Service port with the annotation.
type preserve struct{}

func (preserve) Equal(o tracker.Extension) bool {
	_, ok := o.(preserve)
	return ok
}

// OnService reads PreserveDestination. It is for [tracker.Config.OnService]; a caller with a
// hook of its own calls it from there, after setting Ext. It replaces Ext, so only Services
// without an extension of the caller's can have the annotation: for them OnService does
// nothing. It is safe for concurrent use and never fails.
func OnService(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	if s.Annotations[PreserveDestination] == "true" && p.Ext == nil {
		p.Ext, p.NeedLocalSet = preserve{}, true
	}
	return nil
}

// preservesDestination reports whether OnService found the annotation.
func preservesDestination(p *tracker.ServicePort) bool {
	_, ok := p.Ext.(preserve)
	return ok
}
