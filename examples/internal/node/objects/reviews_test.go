package objects

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/tracker"
)

// TestEngineAndTrackerReportToOneHook has a Service with a mistake, and an external IP of another.
func TestEngineAndTrackerReportToOneHook(t *testing.T) {
	got := map[tracker.Reason]int{}
	hooks := WorldHooks{LeftOut: func(_ v1.ObjectReference, left []tracker.LeftOut) {
		for _, l := range left {
			got[l.Reason]++
		}
	}}
	w, err := New(configtest.Parsed(t, []string{"run", "--hostname-override", "n1"}), nil, nil, hooks, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"a", "b"} {
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		s.Spec.ClusterIP, s.Spec.ExternalIPs = fmt.Sprint("10.96.0.", i+1), []string{"192.0.2.1"}
		s.Spec.Ports = []v1.ServicePort{{Name: "http", Port: 80}}
		if i == 1 {
			s.Spec.SessionAffinity = "clientIP"
		}
		w.SetService(s)
	}
	w.Tracker.MarkSynced(0, 1, 2)
	w.Engine.Snapshot()
	if len(got) != 2 || got[tracker.ReasonFrontendConflict] != 1 || got[tracker.ReasonInvalid] != 1 {
		t.Errorf("the hook got %v", got)
	}
}

// TestLinesAboutManifestsAreBounded reads a hundred Services without clusterIP and with an unknown
// protocol. The agent logs some of them; the verbs that store what is wrong with objects log none.
func TestLinesAboutManifestsAreBounded(t *testing.T) {
	dir := t.TempDir()
	var text strings.Builder
	for i := range 100 {
		fmt.Fprintf(&text, "apiVersion: v1\nkind: Service\nmetadata: {name: web-%d}\nspec: {ports: [{name: http, port: 80, protocol: tcp}]}\n---\n", i)
	}
	text.WriteString("apiVersion: v1\nkind: Service\n")
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, keep := range []bool{false, true} {
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		cfg := configtest.Parsed(t, []string{"run", "--manifests", dir, "--hostname-override", "n1"})
		f, err := newFiles(cfg, logger)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		w, err := New(cfg, nil, nil, WorldHooks{Keep: keep}, logger)
		if err != nil {
			t.Fatal(err)
		}
		f.handInFirst(w)
		if keep {
			if log.Len() != 0 || len(w.Problems()) != 101 || len(w.LeftOutOfService(types.NamespacedName{Namespace: "default", Name: "web-99"})) != 1 {
				t.Errorf("%d problems, log:\n%s", len(w.Problems()), log.String())
			}
			continue
		}
		const line = `msg="an object of the manifests is not as an API server would have it" object="`
		const first = `all.yaml:1: Service default/web-0: an API server would refuse it: port \"http\": protocol \"tcp\" is unknown; an API server would set what it lacks: clusterIP`
		if strings.Count(log.String(), line) != maxReviews || !strings.Contains(log.String(), first) || !strings.Contains(log.String(), "objects=80") {
			t.Errorf("log:\n%s", log.String())
		}
	}
}
