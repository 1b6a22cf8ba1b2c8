package inspect

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

func TestPrintableIsOneHarmlessLine(t *testing.T) {
	for in, want := range map[string]string{
		"ns/web:p":                 "ns/web:p",
		`node "x", zürich`:         `node "x", zürich`,
		"a\x1b[31m\nX\u202e\a\x00": `a\x1b[31m\nX\u202e\a\x00`,
		"\xff":                     "\ufffd",
	} {
		if got := printable(in); got != want {
			t.Errorf("printable(%q) = %q, want %q", in, got, want)
		}
	}
}

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
		{"n?/a?b c:p", odd, true},
		{"n?/a?b", odd, true}, // iptables
		{"n?/a?c", odd, false},
		{"n?/a", odd, false},
		{"", odd, false},
	} {
		if got := storedAs(tt.stored, tt.name); got != tt.want {
			t.Errorf("storedAs(%q, %q) = %v, want %v", tt.stored, tt.name, got, tt.want)
		}
	}
}
