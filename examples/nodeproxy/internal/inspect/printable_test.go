package inspect

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

func TestStoredNames(t *testing.T) {
	long := tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: strings.Repeat("n", 63), Name: strings.Repeat("s", 63)}, Port: "http"}
	odd := tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "n\x1b", Name: "a\nb c"}, Port: "p"}
	for _, tt := range []struct {
		stored string
		name   tracker.ServicePortName
		want   bool
	}{
		{long.String(), long, true},
		{long.String()[:127], long, true},
		{long.String()[:126], long, false},
		{long.String() + "x", long, false},
		{"n?x1b/a?nb c:p", odd, true},
		{"n?x1b/a?nb", odd, true}, // iptables
		{"n?x1b/a?nc", odd, false},
		{"n?x1b/a", odd, false},
		{"", odd, false},
	} {
		if got := storedAs(tt.stored, tt.name); got != tt.want {
			t.Errorf("storedAs(%q, %q) = %v, want %v", tt.stored, tt.name, got, tt.want)
		}
	}
}
