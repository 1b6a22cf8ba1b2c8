//go:build linux

package nftables

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// tool runs the nft tool in the thread's network namespace.
func tool(input string, args ...string) (string, error) {
	var out, failed bytes.Buffer
	cmd := exec.Command("nft", args...)
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
	needNFT(t, h)
	_, err := h.Output("nft", "-c", "add table ip f; add flowtable ip f f { hook ingress priority 0; }")
	flowtables := err == nil
	files, err := filepath.Glob("testdata/*.nft")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			netlab.Need(t, flowtables || !strings.Contains(string(text), "flowtable"), "flowtables (CONFIG_NF_FLOW_TABLE_INET)")
			listing := strings.ReplaceAll(string(text), "\t\t...\n", "") // left-out elements
			if err := h.Do(func() error { _, err := tool(listing, "-c", "-f", "-"); return err }); err != nil {
				t.Error(err)
			}
		})
	}
}

// reloaded is a backend whose tables the nft tool lists, deletes and loads again after each Apply.
type reloaded struct {
	ruleset.Backend
	tb testing.TB
}

func (r reloaded) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := r.Backend.Apply(ctx, d)
	if failed := r.reload(); failed != nil {
		r.tb.Error(failed)
	}
	return err
}

func (r reloaded) reload() error {
	listing, err := tool("", "list", "ruleset")
	if err != nil {
		return err
	}
	if _, err := tool("flush ruleset\n"+listing, "-f", "-"); err != nil {
		return err
	}
	again, err := tool("", "list", "ruleset")
	if err == nil && normal(again) != normal(listing) {
		err = fmt.Errorf("the nft tool loads\n%s\nas\n%s", normal(listing), normal(again))
	}
	return err
}

// TestConformanceOfReloadedTables sends packets through tables that the nft tool has listed and loaded
// again.
func TestConformanceOfReloadedTables(t *testing.T) {
	testtime.NeedThorough(t)
	needNFT(t, netlab.NewHost(t))
	conformance.Run(t, conformance.Options{Skip: skips(), New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families, CountPackets: true})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return reloaded{b, tb}
	}})
}
