//go:build linux

package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// drawn runs the command and returns its pictures by name.
func drawn(t *testing.T, bench string, rivals ...string) (map[string]string, error) {
	t.Helper()
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		name = filepath.Join(dir, name)
		must.Do(t, os.WriteFile(name, []byte(text), 0o644))
		return name
	}
	args := []string{"--graphs", dir, "--bench", file("bench", bench)}
	for i, text := range rivals {
		args = append(args, file(fmt.Sprint("rival", i), text))
	}
	if err := run(t.Context(), args, io.Discard); err != nil {
		return nil, err
	}
	files := must.Get(filepath.Glob(filepath.Join(dir, "*.svg")))(t)
	out := map[string]string{}
	for _, f := range files {
		text := must.Get(os.ReadFile(f))(t)
		out[filepath.Base(f)] = string(text)
	}
	return out, nil
}

const (
	benchText = `goos: linux
pkg: github.com/go-proxier/proxier/nftables
BenchmarkColdStart/services=100/endpoints=10-2   10  4000000 ns/op  2000000 floor-ns/op  2.0 x-floor
BenchmarkColdStart/services=1000/endpoints=10-2  10  30000000 ns/op  15000000 floor-ns/op  2.0 x-floor
BenchmarkColdStart/services=45000/endpoints=1-2  10  300000000 ns/op  150000000 floor-ns/op  2.0 x-floor
BenchmarkOneEndpointChanged/services=100/endpoints=10-2   50000  20000 ns/op  7500 floor-ns/op  2.7 x-floor
BenchmarkOneEndpointChanged/services=1000/endpoints=10-2  50000  20000 ns/op  7500 floor-ns/op  2.7 x-floor
PASS
`
	rivalText = `{"runs": [
{"proxy": "kube-proxy", "version": "Kubernetes v1.37.2", "mode": "nftables", "services": 100, "endpoints": 10, "start": {"seconds": 0.6}, "change": {"p50Ms": 1000}},
{"proxy": "nodeproxy", "mode": "nftables", "services": 100, "endpoints": 10, "start": {"seconds": 0.15}, "change": {"p50Ms": 0.6}},
{"proxy": "kube-proxy", "version": "Kubernetes v1.37.2", "minSyncPeriod": "1ms", "mode": "nftables", "services": 100, "endpoints": 10, "start": {"seconds": 0.6}, "change": {"p50Ms": 28}},
{"proxy": "kube-proxy", "version": "Kubernetes v1.37.2", "mode": "iptables", "services": 100, "endpoints": 10, "start": {"seconds": 0.7}, "change": {"p50Ms": 960}}
]}`
)

// TestSameInputGivesSameBytes draws twice, and compares the pictures in the tree with
// pictures drawn from the data beside them.
func TestSameInputGivesSameBytes(t *testing.T) {
	first := must.Get(drawn(t, benchText, rivalText))(t)
	if len(first) != 4 {
		t.Errorf("%d pictures, want 4", len(first))
	}
	again := must.Get(drawn(t, benchText, rivalText))(t)
	for name, text := range first {
		if again[name] != text {
			t.Errorf("%s differs from itself", name)
		}
		d := xml.NewDecoder(strings.NewReader(text))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	for _, want := range []string{"kube-proxy: 600 ms with 100 Services.", "library alone: 4.0 ms with 100 Services, 30 ms with 1,000 Services.", "floor: 2.0 ms with"} {
		if !strings.Contains(first["cold-start-dark.svg"], want) {
			t.Errorf("no %q in\n%s", want, first["cold-start-dark.svg"])
		}
	}
	for _, want := range []string{"kube-proxy: 1.0 s with 100 Services.", "kube-proxy, 1 ms: 28 ms with 100 Services.", "with its default minSyncPeriod of 1 s, and with one of 1 ms, which is less than a sync takes.",
		"kube-proxy 1.37.2, nodeproxy: beside an API server",
		"kube-proxy was not measured with more than 3,000 Services"} {
		if !strings.Contains(first["one-change-dark.svg"], want) {
			t.Errorf("no %q in\n%s", want, first["one-change-dark.svg"])
		}
	}
	later := must.Get(drawn(t, benchText, rivalText, strings.Replace(rivalText, "0.6", "0.7", 1)))(t)
	if want := "kube-proxy: 700 ms with 100 Services."; !strings.Contains(later["cold-start-dark.svg"], want) {
		t.Errorf("with a later file, no %q in\n%s", want, later["cold-start-dark.svg"])
	}
	if strings.Contains(first["cold-start-light.svg"], "45,000") {
		t.Error("a graph mixes numbers of endpoints")
	}

	data := func(name string) string {
		text := must.Get(os.ReadFile(name))(t)
		return string(text)
	}
	kept := must.Get(drawn(t, data("testdata/nftables.txt"), data("testdata/rival-45000.json"), data("testdata/rival-10000.json"), data("testdata/rival.json")))(t)
	for name, text := range kept {
		got, err := os.ReadFile(name)
		if err != nil || !bytes.Equal(got, []byte(text)) {
			t.Errorf("%s differs from the picture that go generate draws (error %v)", name, err)
		}
	}
}

func TestBadInputIsRejected(t *testing.T) {
	for _, tt := range []struct{ bench, rival, want string }{
		{"BenchmarkColdStart/services=100/endpoints=10-2 10 soon ns/op\n", rivalText, "bench:1: parsing measurement"},
		{strings.ReplaceAll(benchText, "ColdStart", "Other"), rivalText, ""},
		{benchText, "", "rival0: unexpected end"},
		{benchText, "{}", ""},
	} {
		_, err := drawn(t, tt.bench, tt.rival)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("error %v, want %q", err, tt.want)
		}
	}
	for want, args := range map[string][]string{"need a file": {"--graphs", ".", "--bench", "bench"}, "need each other": {"--graphs", ".", "rival"}} {
		if err := run(t.Context(), args, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
