package deploy

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestContributingNamesFoldersThatExist checks the first column of the table of folders.
func TestContributingNamesFoldersThatExist(t *testing.T) {
	text, err := os.ReadFile("../../.github/CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(text), "| folder | what to look for |\n|---|---|\n")
	table, _, end := strings.Cut(table, "\n\n")
	if !ok || !end {
		t.Fatal("no table of folders")
	}
	named := regexp.MustCompile("`([^`]+)`")
	n := 0
	for line := range strings.Lines(table) {
		first := strings.Split(line, "|")[1]
		for _, m := range named.FindAllStringSubmatch(first, -1) {
			n++
			if _, err := os.Stat(filepath.Join("../..", m[1])); err != nil {
				t.Error(err)
			}
		}
	}
	if n < 15 {
		t.Errorf("only %d folders", n)
	}
}
