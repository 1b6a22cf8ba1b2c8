package tuning

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/internal/testing/must"
)

const (
	maxFile     = "proc/sys/net/netfilter/nf_conntrack_max"
	hashFile    = "sys/module/nf_conntrack/parameters/hashsize"
	liberalFile = "proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"
)

func TestLimitGrowsWithCores(t *testing.T) {
	for _, tt := range []struct {
		perCore, least int32
		cores          int
		want           int // 0: left alone
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
		{math.MaxInt32, math.MaxInt32, 64, math.MaxInt32},
		{math.MaxInt32, 5, 64, 1 << 20},
		{math.MaxInt32/2 + 1, 0, 2, 1 << 20},
	} {
		got := Settings(v1alpha1.KubeProxyConntrackConfiguration{
			MaxPerCore: &tt.perCore, Min: &tt.least, TCPEstablishedTimeout: &metav1.Duration{}, TCPCloseWaitTimeout: &metav1.Duration{},
		}, tt.cores)
		var want []Setting
		if tt.want != 0 {
			const skip = "--conntrack-max-per-core=0"
			want = []Setting{{maxFile, tt.want, true, skip}, {hashFile, tt.want / 4, true, skip}}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

func TestTuningYieldsSettings(t *testing.T) {
	after := func(d time.Duration) metav1.Duration { return metav1.Duration{Duration: d} }
	got := Settings(v1alpha1.KubeProxyConntrackConfiguration{
		MaxPerCore: new(int32), TCPEstablishedTimeout: new(after(24 * time.Hour)), TCPCloseWaitTimeout: new(after(time.Hour)),
		UDPTimeout: after(time.Millisecond), UDPStreamTimeout: after(3*time.Second + 1), TCPBeLiberal: true,
	}, 1)
	for i := range got {
		got[i].Skip = "" // core's TestEachParameterCanBeLeftAlone
	}
	dir := "proc/sys/net/netfilter/nf_conntrack_"
	want := []Setting{
		{Path: dir + "tcp_timeout_established", Value: 86400},
		{Path: dir + "tcp_timeout_close_wait", Value: 3600},
		{Path: dir + "udp_timeout", Value: 1},
		{Path: dir + "udp_timeout_stream", Value: 4},
		{Path: liberalFile, Value: 1},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

// sysctls makes a folder of parameters.
func sysctls(t *testing.T, values map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, v := range values {
		file := filepath.Join(root, path)
		must.Do(t, os.MkdirAll(filepath.Dir(file), 0o755))
		must.Do(t, os.WriteFile(file, []byte(v), 0o644))
	}
	return root
}

func TestApplyWritesOnlyDifferences(t *testing.T) {
	root := sysctls(t, map[string]string{maxFile: "65536\n", hashFile: "40000\n", liberalFile: "many\n"})
	for _, tt := range []struct {
		setting Setting
		old     int
		changed bool
		err     error
		file    string
	}{
		{Setting{Path: maxFile, Value: 131072}, 65536, true, nil, "131072"},
		{Setting{Path: maxFile, Value: 131072}, 131072, false, nil, "131072"},
		{Setting{Path: maxFile, Value: 131071, AtLeast: true}, 131072, false, nil, "131072"},
		{Setting{Path: hashFile, Value: 32768, AtLeast: true}, 40000, false, nil, "40000\n"},
		{Setting{Path: hashFile, Value: 40001, AtLeast: true}, 40000, true, nil, "40001"},
		{Setting{Path: liberalFile, Value: 1}, -1, false, strconv.ErrSyntax, "many\n"},
		{Setting{Path: "proc/sys/none", Value: 7}, -1, false, fs.ErrNotExist, ""},
	} {
		old, changed, err := tt.setting.Apply(root)
		text, _ := os.ReadFile(filepath.Join(root, tt.setting.Path))
		if old != tt.old || changed != tt.changed || !errors.Is(err, tt.err) || string(text) != tt.file {
			t.Errorf("%+v: old %d, changed %t, error %v, then %q", tt.setting, old, changed, err, text)
		}
		if tt.err == fs.ErrNotExist && !strings.Contains(err.Error(), "is the kernel module nf_conntrack loaded?") {
			t.Errorf("a missing parameter: %v", err)
		}
	}
}

// TestReadOnlyParameterIsRecognized uses made-up errors, because root may write anything.
func TestReadOnlyParameterIsRecognized(t *testing.T) {
	for err, want := range map[error]bool{
		syscall.EROFS: true, syscall.EACCES: true, syscall.EPERM: true, syscall.EOPNOTSUPP: true, syscall.EINVAL: false,
	} {
		e := Setting{Path: maxFile, Value: 9}.failed(5, &fs.PathError{Op: "open", Path: "x", Err: err})
		if got := strings.Contains(e.Error(), "is 5 and cannot be set to 9 from here"); got != want {
			t.Errorf("%v: %v", err, e)
		}
	}
}
