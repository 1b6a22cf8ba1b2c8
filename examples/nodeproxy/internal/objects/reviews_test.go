package objects

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/configtest"
)

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
