package manifests

import (
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// setDefaults sets the API server's defaults of the fields that a node agent reads. The
// docstrings of k8s.io/api's fields document them.
func setDefaults(o metav1.Object) {
	switch o := o.(type) {
	case *v1.Service:
		if o.Namespace == "" {
			o.Namespace = metav1.NamespaceDefault
		}
		for i := range o.Spec.Ports {
			if p := &o.Spec.Ports[i]; p.Protocol == "" {
				p.Protocol = v1.ProtocolTCP
			}
		}
		if o.Spec.SessionAffinity == v1.ServiceAffinityClientIP && (o.Spec.SessionAffinityConfig == nil ||
			o.Spec.SessionAffinityConfig.ClientIP == nil || o.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil) {
			timeout := v1.DefaultClientIPServiceAffinitySeconds
			o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
				ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &timeout},
			}
		}
	case *discovery.EndpointSlice:
		if o.Namespace == "" {
			o.Namespace = metav1.NamespaceDefault
		}
		for i := range o.Ports {
			p := &o.Ports[i]
			if p.Name == nil {
				p.Name = new(string)
			}
			if p.Protocol == nil {
				tcp := v1.ProtocolTCP
				p.Protocol = &tcp
			}
		}
	default: // a Node or ServiceCIDR belongs to no namespace
		o.SetNamespace("")
	}
}
