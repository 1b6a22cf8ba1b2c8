package worldgen

import (
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/tracker"
)

// Annotations for settings without an API field: a Service's hash, whether it prefers
// local endpoints, and the weight of the address that follows weightPrefix.
const (
	hashAnnotation  = "hash"
	preferLocalName = "prefer-local"
	weightPrefix    = "weight-of-"
)

// SetHash annotates a Service so that [OnService] sets its hash.
func SetHash(s *v1.Service, h tracker.Hash) {
	if h != tracker.HashNone {
		metav1.SetMetaDataAnnotation(&s.ObjectMeta, hashAnnotation, strconv.Itoa(int(h)))
	}
}

// SetPreferLocal annotates a Service so that [OnService] sets PreferLocal.
func SetPreferLocal(s *v1.Service) {
	metav1.SetMetaDataAnnotation(&s.ObjectMeta, preferLocalName, "true")
}

// SetWeight annotates an EndpointSlice so that [OnEndpoint] sets the weight of the
// endpoint with the address.
func SetWeight(s *discovery.EndpointSlice, address string, weight int) {
	metav1.SetMetaDataAnnotation(&s.ObjectMeta, weightPrefix+strings.ReplaceAll(address, ":", "-"), strconv.Itoa(weight))
}

// OnService is a [tracker.Config].OnService hook that reads the annotations of
// [SetHash] and [SetPreferLocal]. It returns an error if a number is not one.
func OnService(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	p.PreferLocal = s.Annotations[preferLocalName] != ""
	if v, ok := s.Annotations[hashAnnotation]; ok {
		h, err := strconv.ParseUint(v, 10, 8)
		p.Hash = tracker.Hash(h)
		return err
	}
	return nil
}

// OnEndpoint is a [tracker.Config].OnEndpoint hook that reads the annotation of
// [SetWeight]. It returns an error if the annotation is not a number.
func OnEndpoint(s *discovery.EndpointSlice, ep *discovery.Endpoint, e *tracker.Endpoint) error {
	if v, ok := s.Annotations[weightPrefix+strings.ReplaceAll(ep.Addresses[0], ":", "-")]; ok {
		w, err := strconv.ParseUint(v, 10, 16)
		e.Weight = uint16(w)
		return err
	}
	return nil
}
