// Package configtest parses command lines in tests.
package configtest

import (
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/config"
)

// Parsed checks a command line of the agent.
func Parsed(t *testing.T, args []string) *config.Config {
	t.Helper()
	if len(args) == 0 || args[0] != "run" {
		t.Fatalf("%q is not a command line of run", args)
	}
	f := config.NewFlags("run")
	if err := f.Parse(args[1:]); err != nil || f.NArg() != 0 {
		t.Fatalf("%q: error %v, arguments %q", args, err, f.Args())
	}
	c, err := f.Config()
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	if len(c.Notes) != 0 {
		t.Errorf("%q: notes %q", args, c.Notes)
	}
	return c
}
