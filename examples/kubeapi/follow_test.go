package kubeapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	componentbase "k8s.io/component-base/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/textfile"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// TestOtherNodesAreIgnored watches an API server that has events of another Node, too.
func TestOtherNodesAreIgnored(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/nodes") || r.URL.Query().Get("watch") == "" || r.URL.Query().Get("sendInitialEvents") != "" {
			serveLists(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		for i, e := range []string{"ADDED other", "DELETED other", "DELETED a", "ADDED n", "DELETED n"} {
			typ, name, _ := strings.Cut(e, " ")
			fmt.Fprintf(w, `{"type":%q,"object":{"kind":"Node","apiVersion":"v1","metadata":{"name":%q,"resourceVersion":"%d"}}}`+"\n", typ, name, i+2)
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(s.CloseClientConnections)
	c := must.Get(NewClient(&rest.Config{Host: s.URL}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	var got []string
	h := handlerOf(func(string) {})
	h.SetNode = func(n *v1.Node) { got = append(got, "set "+n.Name) }
	h.DeleteNode = func() { got = append(got, "gone"); cancel() }
	Follow(ctx, c, tracker.Selector{}, "n", h, slog.New(slog.DiscardHandler))
	if want := []string{"set n", "gone"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestConfigurationThatWouldBlockIsRefused names a folder where a file is expected: like a pipe, it is no regular file.
func TestConfigurationThatWouldBlockIsRefused(t *testing.T) {
	_, err := ClientConfig(componentbase.ClientConnectionConfiguration{Kubeconfig: t.TempDir()}, "")
	if !errors.Is(err, textfile.ErrNotRegular) {
		t.Errorf("error %v, want %v", err, textfile.ErrNotRegular)
	}
}
