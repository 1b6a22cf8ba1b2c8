package tracker

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// LabelServiceProxyName is the label that hands a Service to another proxy than
// the cluster's usual one (KEP-2447).
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// Selector says which Services a proxy is for. The zero value is kube-proxy's:
// all that no other proxy is named for. It can be given to an informer or other
// list call by [Selector.ServiceListOptions] and [Selector.SliceListOptions], to
// save what need not be sent; the trackers apply it in any case, so that a Service
// whose labels change comes and goes as it should.
//
// Services and slices labelled service.kubernetes.io/headless are never selected.
// No other label of a slice matters: the label
// service.kubernetes.io/service-proxy-name only counts on a Service.
type Selector struct {
	// ProxyName selects the Services whose label
	// service.kubernetes.io/service-proxy-name has this value; "" those without
	// the label.
	ProxyName string
	// Filter, if not nil, must also be true of a Service. It must not change or
	// keep it, and must be a pure function of it: it is asked only when the Service
	// is handed in.
	Filter func(*v1.Service) bool
}

// ServiceListOptions returns the label and field selectors, as in metav1's
// ListOptions, for a list or watch of Services. Filter is not in them.
func (s Selector) ServiceListOptions() (labelSelector, fieldSelector string) {
	label := "!" + LabelServiceProxyName
	if s.ProxyName != "" {
		label = LabelServiceProxyName + "=" + s.ProxyName
	}
	return label + ",!" + v1.IsHeadlessService, "spec.clusterIP!=" + v1.ClusterIPNone
}

// SliceListOptions returns the label and field selectors for a list or watch of
// EndpointSlices. They exclude slices labelled service.kubernetes.io/headless and
// nothing else, as in kube-proxy. In particular they ignore the label
// service.kubernetes.io/service-proxy-name: the EndpointSlice controller copies it
// from the Service, but a slice made by hand may lack it or carry another value. A
// slice whose Service is not selected costs memory and has no other effect.
func (s Selector) SliceListOptions() (labelSelector, fieldSelector string) {
	return "!" + v1.IsHeadlessService, ""
}

// MatchesService reports whether s is selected.
func (s Selector) MatchesService(svc *v1.Service) bool {
	name, named := svc.Labels[LabelServiceProxyName]
	if named != (s.ProxyName != "") || name != s.ProxyName {
		return false
	}
	if _, headless := svc.Labels[v1.IsHeadlessService]; headless {
		return false
	}
	return s.Filter == nil || s.Filter(svc)
}

// MatchesSlice reports whether slice matches the selectors of
// [Selector.SliceListOptions]. It does not look at the Service that owns slice.
func (s Selector) MatchesSlice(slice *discovery.EndpointSlice) bool {
	_, headless := slice.Labels[v1.IsHeadlessService]
	return !headless
}

func (s Selector) validate() error {
	if problems := validation.IsValidLabelValue(s.ProxyName); len(problems) > 0 {
		return fmt.Errorf("Selector.ProxyName %q: %s", s.ProxyName, strings.Join(problems, "; "))
	}
	return nil
}
