//go:build linux

package nftables

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// tool runs the nft tool in the thread's network namespace.
func tool(input string, args ...string) (string, error) {
	var out, failed bytes.Buffer
	path, err := exec.LookPath("nft")
	if err != nil {
		return "", err
	}
	cmd := exec.Command(path, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &failed
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("nft %s: %w\n%s", strings.Join(args, " "), err, failed.String())
	}
	return out.String(), nil
}

// TestGoldensLoad gives the golden listings to the nft tool.
func TestGoldensLoad(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	netlab.NeedPrograms(t, "nft")
	_, err := h.Run(t, "nft", "-c", "add table ip f; add flowtable ip f f { hook ingress priority 0; }")
	flowtables := err == nil
	files, err := filepath.Glob("testdata/*.nft")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text := must.Get(os.ReadFile(file))(t)
			if !flowtables && strings.Contains(string(text), "flowtable") {
				t.Skip("no flowtables (CONFIG_NF_FLOW_TABLE_INET): TestOffloadByFlowtables loads its listing")
			}
			listing := strings.ReplaceAll(string(text), "\t\t...\n", "") // left-out elements
			if err := h.Do(func() error { _, err := tool(listing, "-c", "-f", "-"); return err }); err != nil {
				t.Error(err)
			}
		})
	}
}

// reload makes tests load with the nft tool what the backend wrote, in every world of the conformance
// suite.
var reload = flag.Bool("reload", false, "send packets through reloaded tables in all worlds")

// dynamic matches elements that packets add, change or let expire.
var dynamic = regexp.MustCompile(`(?m)^.* (?:counter packets|expires) .*\n|\t# count \d+$`)

// stable is a listing without what packets and time change.
func stable(listing string) string { return dynamic.ReplaceAllString(normal(listing), "") }

// loads returns an error if the nft tool refuses the listing of the thread's network namespace in place of
// everything. With commit it loads the listing, and nothing may have changed afterwards.
func loads(tb testing.TB, commit bool) error {
	listing, err := tool("", "list", "ruleset")
	if err != nil {
		return err
	}
	args := []string{"-f", "-"}
	if !commit {
		args = append(args, "-c")
	}
	_, err = tool("flush ruleset\n"+listing, args...)
	if err != nil {
		if strings.Contains(err.Error(), "Message too long") {
			return nil // in a user namespace, the tool cannot make its socket's buffer large
		}
		return err
	}
	if !commit {
		return nil
	}
	again, err := tool("", "list", "ruleset")
	if err == nil && stable(again) != stable(listing) {
		err = fmt.Errorf("the nft tool loads a listing as another one: %s", backendtest.FirstDifference(stable(again), stable(listing)))
	}
	return err
}

// loadsJSON is loads for the listing in JSON, without commit.
func loadsJSON() error {
	listing, err := tool("", "-j", "list", "ruleset")
	if err == nil {
		_, err = tool(`{"nftables": [{"flush": {"ruleset": null}}, `+strings.TrimPrefix(listing, `{"nftables": [`), "-j", "-c", "-f", "-")
	}
	return err
}

// reloaded is a backend whose tables the nft tool lists, deletes and loads again after each Apply.
type reloaded struct {
	ruleset.Backend
	tb   testing.TB
	json bool
}

func (r reloaded) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := r.Backend.Apply(ctx, d)
	if failed := loads(r.tb, true); failed != nil {
		r.tb.Error(failed)
	}
	if r.json {
		// No version up to 1.1.7 reads the hash of a concatenation.
		if failed := loadsJSON(); failed != nil && !strings.Contains(failed.Error(), "Invalid jhash expression") {
			r.tb.Error(failed)
		}
	}
	return err
}

// nftVersion returns the tool's version, such as {1, 0, 6}.
func nftVersion(tb testing.TB, h *netlab.Host) (v [3]int) {
	tb.Helper()
	netlab.NeedPrograms(tb, "nft")
	out, _ := h.Run(tb, "nft", "--version")
	if _, err := fmt.Sscanf(out, "nftables v%d.%d.%d", &v[0], &v[1], &v[2]); err != nil {
		tb.Fatalf("%q: %v", out, err)
	}
	return v
}

// TestConformanceOfReloadedTables sends packets through tables that the nft tool has listed and loaded
// again. DESIGN.md names the exceptions.
func TestConformanceOfReloadedTables(t *testing.T) {
	t.Parallel()
	if !*reload {
		t.Skip("takes long; -reload runs it")
	}
	version := nftVersion(t, netlab.NewHost(t))
	// The tool's copy of a map's key of more than 16 bytes overlaps its data.
	families := []tracker.Family{tracker.IPv4}
	current := slices.Compare(version[:], []int{1, 1, 3}) >= 0
	if current {
		families = nil
	}
	conformance.Run(t, conformance.Options{Skip: skips(), Families: families, New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		if strings.HasSuffix(tb.Name(), "/changes_under_load") || strings.HasSuffix(tb.Name(), "/frontends_that_move") {
			tb.Skip("connections that begin while the tool replaces the tables may be refused")
		}
		b := must.Get(New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families}))(tb)
		tb.Cleanup(func() { b.Close() })
		return reloaded{b, tb, current}
	}})
}
