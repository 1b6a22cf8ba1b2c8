package endpointslice

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"
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
