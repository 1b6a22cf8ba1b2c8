package ruleset

import (
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// TestPartialErrorText checks that the text names the first few Services.
func TestPartialErrorText(t *testing.T) {
	e := &PartialError{Failed: map[tracker.Key]error{}}
	for _, s := range []string{"d", "c", "b", "a"} {
		e.Failed[key(s, tracker.IPv4)] = errInjected
	}
	want := "4 services failed; default/a:p/TCP/IPv4: injected failure; default/b:p/TCP/IPv4: injected failure; default/c:p/TCP/IPv4: injected failure; ..."
	if got := e.Error(); got != want {
		t.Errorf("got %q", got)
	}
}
