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

// measuredBefore has the documents with results that were measured beside an earlier release
// than [Kubernetes], and that release. Remove an entry when the results are measured again.
var measuredBefore = map[string]string{
	".github/MEASUREMENTS.md":          "1.36",
	"examples/nodeproxy/e2e/README.md": "1.36",
}

// mention matches a release of Kubernetes in prose. The first and the last group are not empty
// if the text is about when something began.
var mention = regexp.MustCompile(`(before |since )?(?:kube-proxy|Kubernetes|Reference for)(?:\n//)?\s+v?1\.(\d+)( and later)?`)

// outdated returns the releases before [Kubernetes] that a text names, except one.
func outdated(text, except string) (out []string) {
	newest, err := strconv.Atoi(strings.TrimPrefix(Kubernetes, "1."))
	if err != nil {
		return []string{err.Error()}
	}
	for _, m := range mention.FindAllStringSubmatch(text, -1) {
		if minor, err := strconv.Atoi(m[2]); m[1] == "" && m[3] == "" && err == nil && minor < newest && "1."+m[2] != except {
			out = append(out, "1."+m[2])
		}
	}
	return out
}

// TestDocumentsNameTheNewestRelease finds documents and comments that compare the tree with an
// earlier release of Kubernetes than the constant says.
func TestDocumentsNameTheNewestRelease(t *testing.T) {
	for text, want := range map[string]int{
		"as kube-proxy 1.36 does": 1, "as of Kubernetes v1.35.2": 1, "the Kubernetes Metrics Reference for\n// v1.36": 1,
		"kube-proxy " + Kubernetes: 0, "removed in Kubernetes 1.43": 0, "Linux 5.10": 0, "before Kubernetes 1.33": 0, "Kubernetes 1.36 and later": 0,
	} {
		if got := outdated(text, ""); len(got) != want {
			t.Errorf("%q: %q", text, got)
		}
	}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Base(path) == "release_test.go" {
			return err
		}
		switch filepath.Ext(path) {
		case ".go", ".md", ".yaml", ".service":
		default:
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		before := measuredBefore[filepath.ToSlash(name)]
		if before != "" && len(outdated(string(text), "")) == 0 {
			t.Errorf("%s no longer names Kubernetes %s: remove its entry", name, before)
		}
		for _, release := range outdated(string(text), before) {
			t.Errorf("%s names Kubernetes %s; the tree was compared with %s", name, release, Kubernetes)
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
