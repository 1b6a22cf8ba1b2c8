package config

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// root is the repository's folder.
const root = "../../../.."

// mention matches a release of Kubernetes in prose. The first and the last group are not empty
// if the text is about when something began.
var mention = regexp.MustCompile(`(before |since )?(?:kube-proxy|Kubernetes|Reference for)(?:\n//)?\s+v?1\.(\d+)( and later)?`)

// outdated returns the releases before [Kubernetes] that a text names.
func outdated(text string) (out []string) {
	newest, err := strconv.Atoi(strings.TrimPrefix(Kubernetes, "1."))
	if err != nil {
		return []string{err.Error()}
	}
	for _, m := range mention.FindAllStringSubmatch(text, -1) {
		if minor, err := strconv.Atoi(m[2]); m[1] == "" && m[3] == "" && err == nil && minor < newest {
			out = append(out, "1."+m[2])
		}
	}
	return out
}

// TestDocumentsNameTheNewestRelease finds documents, comments and results that compare the tree
// with an earlier release of Kubernetes than the constant says.
func TestDocumentsNameTheNewestRelease(t *testing.T) {
	for text, want := range map[string]int{
		"as kube-proxy 1.36 does": 1, "as of Kubernetes v1.35.2": 1, "the Kubernetes Metrics Reference for\n// v1.36": 1,
		"kube-proxy " + Kubernetes: 0, "removed in Kubernetes 1.43": 0, "Linux 5.10": 0, "before Kubernetes 1.33": 0, "Kubernetes 1.36 and later": 0,
	} {
		if got := outdated(text); len(got) != want {
			t.Errorf("%q: %q", text, got)
		}
	}
	patch := map[string]bool{}
	for _, module := range []string{"apiserver", "cluster"} {
		text, err := os.ReadFile(filepath.Join(root, "examples", "e2e", module, "go.mod"))
		_, rest, found := strings.Cut(string(text), "\tk8s.io/kubernetes v"+Kubernetes+".")
		if err != nil || !found {
			t.Fatalf("error %v, or module %s does not require Kubernetes %s", err, module, Kubernetes)
		}
		patch[strings.Fields(rest)[0]] = true
	}
	if len(patch) != 1 {
		t.Fatalf("the modules require different patch releases of Kubernetes %s: %v", Kubernetes, patch)
	}
	exact := regexp.MustCompile(`(?:kube-proxy|kube-proxy\.exe|Kubernetes)\s+v?` + regexp.QuoteMeta(Kubernetes) + `\.(\d+)`)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Base(path) == "release_test.go" {
			return err
		}
		switch filepath.Ext(path) {
		case ".go", ".md", ".yaml", ".service", ".json", ".csv", ".svg":
		default:
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range exact.FindAllStringSubmatch(string(text), -1) {
			if !patch[m[1]] {
				t.Errorf("%s says %s; the modules of e2e require patch release %v", path, m[0], patch)
			}
		}
		for _, release := range outdated(string(text)) {
			t.Errorf("%s names Kubernetes %s; the tree was compared with %s", path, release, Kubernetes)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil || !strings.Contains(string(readme), "kube-proxy "+Kubernetes+"'s flags") {
		t.Errorf("error %v, or README.md does not name kube-proxy %s", err, Kubernetes)
	}
}
