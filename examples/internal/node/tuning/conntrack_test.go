package tuning

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	maxFile     = "proc/sys/net/netfilter/nf_conntrack_max"
	hashFile    = "sys/module/nf_conntrack/parameters/hashsize"
	liberalFile = "proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"
)

func TestLimitGrowsWithCores(t *testing.T) {
	for _, tt := range []struct {
		perCore, least, cores int
		want                  int // 0: left alone
	}{
		{0, 131072, 4, 0},
		{32768, 131072, 2, 131072},
		{32768, 131072, 4, 131072},
		{32768, 131072, 8, 262144},
		{32768, 131072, 32, 1 << 20},
		{32768, 131072, 33, 1 << 20},
		{32768, 0, 0, 32768},
		{1, 1, 1, 1},
		{1, 2 << 20, 1, 2 << 20}, // the floor has no cap
		{32768, 2 << 20, 64, 2 << 20},
		{math.MaxInt, math.MaxInt, 64, math.MaxInt},
		{math.MaxInt, 5, 64, 1 << 20},
		{math.MaxInt/2 + 1, 0, 2, 1 << 20},
	} {
		got, err := Conntrack{MaxPerCore: tt.perCore, Min: tt.least}.Settings(tt.cores)
		var want []Setting
		if tt.want != 0 {
			want = []Setting{{Path: maxFile, Value: tt.want, AtLeast: true}, {Path: hashFile, Value: tt.want / 4, AtLeast: true}}
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v: %v, error %v", tt, got, err)
		}
	}
}

func TestTuningYieldsSettings(t *testing.T) {
	got, err := Conntrack{
		TCPEstablishedTimeout: 24 * time.Hour, TCPCloseWaitTimeout: time.Hour,
		UDPTimeout: time.Millisecond, UDPStreamTimeout: 3*time.Second + 1, TCPBeLiberal: true,
	}.Settings(1)
	dir := "proc/sys/net/netfilter/nf_conntrack_"
	want := []Setting{
		{Path: dir + "tcp_timeout_established", Value: 86400},
		{Path: dir + "tcp_timeout_close_wait", Value: 3600},
		{Path: dir + "udp_timeout", Value: 1},
		{Path: dir + "udp_timeout_stream", Value: 4},
		{Path: liberalFile, Value: 1},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, error %v", got, err)
	}
	for _, bad := range []Conntrack{{MaxPerCore: -1}, {Min: -1}, {UDPTimeout: -1}, {TCPEstablishedTimeout: -time.Hour}} {
		if _, err := bad.Settings(1); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

// sysctls makes a folder of parameters.
func sysctls(t *testing.T, values map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, v := range values {
		file := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(v), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestApplyWritesOnlyDifferences(t *testing.T) {
	root := sysctls(t, map[string]string{maxFile: "65536\n", hashFile: "40000\n", liberalFile: "many\n"})
	settings := []Setting{
		{Path: maxFile, Value: 131072},
		{Path: hashFile, Value: 32768, AtLeast: true},
		{Path: liberalFile, Value: 1},
		{Path: "proc/sys/none", Value: 7},
	}
	results := Apply(root, settings)
	want := []Result{{Setting: settings[0], Old: 65536, Changed: true}, {Setting: settings[1], Old: 40000}}
	if len(results) != len(settings) || !reflect.DeepEqual(results[:2], want) {
		t.Fatalf("results %v, want first %v", results, want)
	}
	if text, _ := os.ReadFile(filepath.Join(root, maxFile)); string(text) != "131072" {
		t.Errorf("the limit is %q", text)
	}
	if text, _ := os.ReadFile(filepath.Join(root, hashFile)); string(text) != "40000\n" {
		t.Errorf("the hash size is %q", text)
	}
	if err := results[2].Err; !errors.Is(err, strconv.ErrSyntax) || results[2].Setting != settings[2] {
		t.Errorf("a value that is no number: %v", results[2])
	}
	if err := results[3].Err; !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "is the kernel module nf_conntrack loaded?") {
		t.Errorf("a missing parameter: %v", results[3])
	}
	for _, r := range Apply(root, settings[:2]) {
		if r.Changed || r.Err != nil {
			t.Errorf("again: %v", r)
		}
	}
}

// TestLimitIsOnlyRaised tunes nodes whose limit is lower and higher than the computed one.
func TestLimitIsOnlyRaised(t *testing.T) {
	settings, err := Conntrack{MaxPerCore: 32768, Min: 131072}.Settings(4)
	if err != nil {
		t.Fatal(err)
	}
	for was, want := range map[string]string{"65536": "131072", "131072": "131072", "262144": "262144"} {
		root := sysctls(t, map[string]string{maxFile: was, hashFile: "65536"})
		for _, r := range Apply(root, settings) {
			if r.Err != nil || r.Changed && was == want {
				t.Errorf("limit %s: %+v", was, r)
			}
		}
		if got, err := os.ReadFile(filepath.Join(root, maxFile)); err != nil || string(got) != want {
			t.Errorf("limit %s became %q, want %s; error %v", was, got, want, err)
		}
	}
}

// TestReadOnlyParameterIsRecognized uses made-up errors, because root may write anything.
func TestReadOnlyParameterIsRecognized(t *testing.T) {
	e := &settingError{setting: Setting{Path: maxFile, Value: 9}, now: 5, known: true}
	for err, want := range map[error]bool{
		syscall.EROFS: true, syscall.EACCES: true, syscall.EPERM: true, syscall.EOPNOTSUPP: true, syscall.EINVAL: false,
	} {
		e.err = &fs.PathError{Op: "open", Path: "x", Err: err}
		if got := strings.Contains(e.Error(), "is 5 and cannot be set to 9 from here"); got != want {
			t.Errorf("%v: %v", err, e)
		}
	}
}
