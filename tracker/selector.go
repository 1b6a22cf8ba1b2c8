package tracker

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/go-proxier/proxier/internal/complaint"
)

// LabelServiceProxyName is the label that assigns a Service to a proxy other than the
// cluster's default one (KEP-2447).
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// Selector selects the Services of a proxy. The zero value is kube-proxy's: every Service that is not assigned to
// another proxy. [Selector.ServiceListOptions] and [Selector.SliceListOptions] return equivalent list options, so
// that the API server sends fewer objects. The trackers apply the Selector in any case.
//
// A Selector never selects Services and slices labeled service.kubernetes.io/headless. It ignores all other labels of
// slices.
type Selector struct {
	// ProxyNames selects the Services whose label service.kubernetes.io/service-proxy-name has one
	// of these values. "" in the list selects the Services without the label. Nil means these
	// alone.
	ProxyNames []string
	// Filter, if not nil, further restricts the selection to Services for which it returns true. It must be a pure
	// function of the Service, which it must not change or keep: the tracker calls it only when the Service is set.
	Filter func(*v1.Service) bool
}

// ServiceListOptions returns label and field selectors for metav1.ListOptions in a
// list or watch of Services. They do not include Filter.
func (s Selector) ServiceListOptions() (labelSelector, fieldSelector string) {
	label := "!" + v1.IsHeadlessService
	switch {
	case len(s.ProxyNames) == 0, len(s.ProxyNames) == 1 && s.ProxyNames[0] == "":
		label = "!" + LabelServiceProxyName + "," + label
	case !slices.Contains(s.ProxyNames, ""): // no selector means "without the label, or with one of these values"
		label = LabelServiceProxyName + " in (" + strings.Join(s.ProxyNames, ",") + ")," + label
	}
	return label, "spec.clusterIP!=" + v1.ClusterIPNone
}

// selects reports whether the proxy serves a Service whose label has the value, if it has the label.
func (s Selector) selects(value string, labeled bool) bool {
	if !labeled {
		return len(s.ProxyNames) == 0 || slices.Contains(s.ProxyNames, "")
	}
	return value != "" && slices.Contains(s.ProxyNames, value)
}

// SliceListOptions returns label and field selectors for a list or watch of EndpointSlices. As in kube-proxy, they
// exclude only slices labeled service.kubernetes.io/headless: a hand-made slice may lack the Service's label
// service.kubernetes.io/service-proxy-name. A slice of an unselected Service costs memory and has no other effect.
func (s Selector) SliceListOptions() (labelSelector, fieldSelector string) {
	return "!" + v1.IsHeadlessService, ""
}

// rejects returns why s does not select svc, for programs and for people, or "" if it does.
func (s Selector) rejects(svc *v1.Service) (_ Reason, why string) {
	name, named := svc.Labels[LabelServiceProxyName]
	if !s.selects(name, named) {
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

// matchesSlice reports whether slice matches the selectors of [Selector.SliceListOptions]. A nil slice does not.
func (s Selector) matchesSlice(slice *discovery.EndpointSlice) bool {
	if slice == nil {
		return false
	}
	_, headless := slice.Labels[v1.IsHeadlessService]
	return !headless
}

func (s Selector) validate() error {
	for _, name := range s.ProxyNames {
		if problems := validation.IsValidLabelValue(name); len(problems) > 0 {
			return fmt.Errorf("Selector.ProxyNames: %q: %s", name, strings.Join(problems, "; "))
		}
	}
	return nil
}
