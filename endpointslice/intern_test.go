package endpointslice

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestNamesAreSharedAndDropped(t *testing.T) {
	n := interned{one: recent[string]{limit: 4}, many: recent[[]string]{limit: 4}}
	big := strings.Repeat("x", 100) + "node"
	first := n.name(big[100:])
	if first != "node" || unsafe.StringData(first) == unsafe.StringData(big[100:]) {
		t.Error("the name shares memory with the caller's string")
	}
	for i := range 1000 {
		n.name(fmt.Sprint("other-", i))
		if i%3 == 0 && unsafe.StringData(n.name("node")) != unsafe.StringData(first) {
			t.Fatal("a name in use was dropped")
		}
		if len(n.one.young)+len(n.one.old) > 8 {
			t.Fatal("names are never dropped")
		}
	}
	if n.name("") != "" {
		t.Error("the empty name is not empty")
	}
}

func TestEqualSetsAreShared(t *testing.T) {
	n := interned{one: recent[string]{limit: 4}, many: recent[[]string]{limit: 4}}
	set := func(s ...string) []string {
		n.list = append(n.list, s...)
		return n.set()
	}
	if got := set(); got != nil {
		t.Error(got)
	}
	ab := set("b", "a", "b")
	if !slices.Equal(ab, []string{"a", "b"}) {
		t.Error(ab)
	}
	if again := set("a", "b"); &again[0] != &ab[0] {
		t.Error("equal sets are not shared")
	}
	// Different sets whose concatenations are equal.
	if got := set("ab"); !slices.Equal(got, []string{"ab"}) {
		t.Error(got)
	}
	if got := set("a\x01b"); !slices.Equal(got, []string{"a\x01b"}) {
		t.Error(got)
	}
	if got := set(""); !slices.Equal(got, []string{""}) {
		t.Error(got)
	}
}

// TestProductOfASliceIsBounded has a slice of 1,000 addresses and 1,000 ports.
func TestProductOfASliceIsBounded(t *testing.T) {
	var reported []LeftOut
	cache := New(Plain(func(_ *discovery.EndpointSlice, left []LeftOut) { reported = left }))
	s := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "a", Labels: map[string]string{discovery.LabelServiceName: "a"}}}
	for i := range 1000 {
		name, port := fmt.Sprintf("p%03d", i), int32(1000+i)
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Port: &port})
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", i/250, i%250)}})
	}
	if !cache.Set(s) || len(reported) != 1 || reported[0].Reason != ReasonLimitExceeded {
		t.Fatalf("reported %v", reported)
	}
	changes := cache.Take()
	if len(changes) != 1 || len(changes[0].New) != maxEndpoints/1000 || changes[0].New[0].Name != "p000" || len(changes[0].New[0].Endpoints) != 1000 {
		t.Fatalf("%d ports", len(changes[0].New))
	}
	reported = nil
	s.Ports = s.Ports[:maxEndpoints/1000]
	if cache.Set(s) || reported != nil {
		t.Errorf("the same ports are a change, or reported: %v", reported)
	}
}
