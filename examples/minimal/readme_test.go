package main

import (
	"os"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestReadmeShowsThisAgent looks for each line of README's snippet, in its order, in run. A line "..." stands
// for what README leaves out, such as "return err".
func TestReadmeShowsThisAgent(t *testing.T) {
	readme := must.Get(os.ReadFile("../../README.md"))(t)
	source := must.Get(os.ReadFile("main.go"))(t)
	_, snippet, ok := strings.Cut(string(readme), "```go\n")
	if !ok {
		t.Fatal("README has no snippet")
	}
	snippet, _, _ = strings.Cut(snippet, "```")
	lines, n := strings.Split(string(source), "\n"), 0
	for line := range strings.SplitSeq(snippet, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line == "..." {
			continue
		}
		n++
		found := false
		for i, s := range lines {
			if found = strings.TrimSpace(s) == line; found {
				lines = lines[i+1:]
				break
			}
		}
		if !found {
			t.Fatalf("main.go has no line %q where README has it", line)
		}
	}
	if n < 13 {
		t.Errorf("README shows %d lines of code", n)
	}
}
