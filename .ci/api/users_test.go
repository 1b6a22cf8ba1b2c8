package api

import (
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

// TestUsersAreRecorded compares users.txt with the tree, so that a change of the API shows in review who
// uses it.
func TestUsersAreRecorded(t *testing.T) {
	now := get(Users(root))(t)
	if *update {
		do(t, os.WriteFile("users.txt", []byte(strings.Join(now, "\n")+"\n"), 0o644))
	}
	recorded := lines(t, "users.txt")
	if !slices.Equal(now, recorded) {
		t.Error("users.txt is not current. Run in .ci/api: go test . -update")
	}
	none := 0
	for _, l := range now {
		if strings.HasSuffix(l, ":") {
			none++
		}
	}
	t.Logf("%d exported identifiers and members, %d without a user in a product file of another package", len(now), none)
}

// TestEveryNameHasAUserOrAReason finds names that no product file of another package, no example and no
// port uses, and that unused.txt does not give a reason for. A line there is a name, or the beginning of
// names and "*", and the reason.
func TestEveryNameHasAUserOrAReason(t *testing.T) {
	now := get(Users(root))(t)
	ports, reasons := lines(t, "ports.txt"), lines(t, "unused.txt")
	needed := map[string]bool{}
	for _, l := range now {
		name, users, _ := strings.Cut(l, ":")
		if users != "" || slices.Contains(ports, path.Base(name)) {
			continue
		}
		i := slices.IndexFunc(reasons, func(r string) bool {
			of, reason, _ := strings.Cut(r, ": ")
			begin, all := strings.CutSuffix(of, "*")
			return reason != "" && (of == name || all && strings.HasPrefix(name, begin))
		})
		if i < 0 {
			t.Errorf("%s has no user. Delete it, or write the reason into unused.txt", name)
			continue
		}
		needed[reasons[i]] = true
	}
	for _, r := range reasons {
		if !needed[r] {
			t.Errorf("unused.txt is out of date: the names have users, or do not exist: %s", r)
		}
	}
}

// TestPortsFindWhatTheyUse looks for each name that one of three vendors' ports uses.
func TestPortsFindWhatTheyUse(t *testing.T) {
	have := map[string]bool{}
	for _, p := range load(t) {
		for _, name := range members(p.Types) {
			have[p.Types.Name()+"."+name] = true
		}
	}
	names := lines(t, "ports.txt")
	if len(names) < 50 {
		t.Errorf("ports.txt has %d names", len(names))
	}
	for _, name := range names {
		if !have[name] {
			t.Errorf("a port uses %s, which does not exist", name)
		}
	}
}

// lines returns the lines of a file.
func lines(t *testing.T, name string) []string {
	t.Helper()
	text := get(os.ReadFile(name))(t)
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}
