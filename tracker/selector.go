package tracker

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/go-proxier/proxier/internal/complaint"
)

// LabelServiceProxyName is the label that assigns a Service to a proxy other than the
// cluster's default one (KEP-2447).
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// Selector selects the Services of a proxy. The zero value is kube-proxy's: every
// Service that is not assigned to another proxy. [Selector.ServiceListOptions] and
// [Selector.SliceListOptions] return equivalent list options, so that the API server
// sends fewer objects. The trackers apply the Selector in any case: a Service whose
// labels change is added or removed.
//
// A Selector never selects Services and slices labeled
// service.kubernetes.io/headless. It ignores all other labels of slices:
// service.kubernetes.io/service-proxy-name counts only on a Service.
type Selector struct {
	// ProxyName selects the Services whose label
	// service.kubernetes.io/service-proxy-name has this value. "" selects the
	// Services without the label.
	ProxyName string
	// Filter, if not nil, further restricts the selection to Services for which it
	// returns true. It must not change or keep the Service and must be a pure
	// function of it: the tracker calls it only when the Service is set.
	Filter func(*v1.Service) bool
}

// ServiceListOptions returns label and field selectors for metav1.ListOptions in a
// list or watch of Services. They do not include Filter.
func (s Selector) ServiceListOptions() (labelSelector, fieldSelector string) {
	label := "!" + LabelServiceProxyName
	if s.ProxyName != "" {
		label = LabelServiceProxyName + "=" + s.ProxyName
	}
	return label + ",!" + v1.IsHeadlessService, "spec.clusterIP!=" + v1.ClusterIPNone
}

// SliceListOptions returns label and field selectors for a list or watch of
// EndpointSlices. As in kube-proxy, they exclude only slices labeled
// service.kubernetes.io/headless. They ignore the label
// service.kubernetes.io/service-proxy-name: the EndpointSlice controller copies it
// from the Service, but a hand-made slice may lack it or have another value. A slice
// of an unselected Service costs memory and has no other effect.
func (s Selector) SliceListOptions() (labelSelector, fieldSelector string) {
	return "!" + v1.IsHeadlessService, ""
}

// rejects returns why s does not select svc, for programs and for people, or "" if it does.
func (s Selector) rejects(svc *v1.Service) (_ Reason, why string) {
	name, named := svc.Labels[LabelServiceProxyName]
	if named != (s.ProxyName != "") || name != s.ProxyName {
		if !named {
			return ReasonOtherProxy, "it has no label " + LabelServiceProxyName
		}
		return ReasonOtherProxy, fmt.Sprintf("its label %s is %q: it is for another proxy", LabelServiceProxyName, complaint.Value(name))
	}
	if _, headless := svc.Labels[v1.IsHeadlessService]; headless {
		return ReasonHeadlessLabel, errHeadlessLabel.Error()
	}
	if s.Filter != nil && !s.Filter(svc) {
		return ReasonFiltered, "the proxy does not select it"
	}
	return "", ""
}

// matchesSlice reports whether slice matches the selectors of
// [Selector.SliceListOptions]. It ignores the Service that owns slice. A nil slice does not
// match.
func (s Selector) matchesSlice(slice *discovery.EndpointSlice) bool {
	if slice == nil {
		return false
	}
	_, headless := slice.Labels[v1.IsHeadlessService]
	return !headless
}

func (s Selector) validate() error {
	if problems := validation.IsValidLabelValue(s.ProxyName); len(problems) > 0 {
		return fmt.Errorf("Selector.ProxyName %q: %s", s.ProxyName, strings.Join(problems, "; "))
	}
	return nil
}
