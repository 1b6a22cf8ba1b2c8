package api

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// snippet matches a snippet of Go and the file that it is from.
var snippet = regexp.MustCompile("(?s)```go (\\S+)\n(.*?)```")

// TestSnippetsAreFromTheirFiles looks for each line of the snippets of a page, in their order, in the file that the
// snippet names. A line "..." stands for others.
func TestSnippetsAreFromTheirFiles(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, ".github/RENDERERS.md"))
	if err != nil {
		t.Fatal(err)
	}
	all := snippet.FindAllStringSubmatch(string(page), -1)
	if len(all) != 4 {
		t.Errorf("%d snippets", len(all))
	}
	for _, s := range all {
		source, err := os.ReadFile(filepath.Join(root, s[1]))
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(string(source), "\n")
		for want := range strings.SplitSeq(strings.TrimSpace(s[2]), "\n") {
			want = strings.TrimSpace(want)
			found := want == "..."
			for i := 0; i < len(lines) && !found; i++ {
				if found = strings.TrimSpace(lines[i]) == want; found {
					lines = lines[i+1:]
				}
			}
			if !found {
				t.Fatalf("%s has no line %q where the page has it", s[1], want)
			}
		}
	}
}

// TestProofsExist checks that the tree has the tests that CONTRIBUTING.md names.
func TestProofsExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, ".github", "CONTRIBUTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	missing := map[string]bool{}
	for _, m := range regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z]+)`").FindAllSubmatch(text, -1) {
		missing[string(m[1])] = true
	}
	if len(missing) < 20 {
		t.Errorf("CONTRIBUTING.md names %d tests", len(missing))
	}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	err = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(text, -1) {
			delete(missing, string(m[1]))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range missing {
		t.Errorf("CONTRIBUTING.md names %s, which does not exist", name)
	}
}
