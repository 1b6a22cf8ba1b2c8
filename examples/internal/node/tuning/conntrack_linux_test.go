package tuning

import (
	"os"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// TestKernelParametersAreTuned sets the timeouts of its own network namespace, and fails to set
// the limit, which only the initial namespace may set.
func TestKernelParametersAreTuned(t *testing.T) {
	h := netlab.NewHost(t)
	missing := false
	err := h.Do(func() error {
		// The namespace has conntrack parameters once conntrack is in use.
		c, err := conntrack.New(t.Context(), conntrack.Config{})
		if err != nil {
			return err
		}
		defer c.Close()
		settings := Settings(v1alpha1.KubeProxyConntrackConfiguration{
			MaxPerCore: new(int32(1)), Min: new(int32(1 << 30)), // more than any machine has, because the limit is only raised
			TCPEstablishedTimeout: &metav1.Duration{Duration: 23 * time.Hour}, TCPCloseWaitTimeout: &metav1.Duration{},
			UDPStreamTimeout: metav1.Duration{Duration: 77 * time.Second}, TCPBeLiberal: true,
		}, 1)
		// The machine's hash table stays as it is.
		settings = slices.DeleteFunc(settings, func(s Setting) bool { return s.Path == hashFile })
		if _, err := os.Stat("/" + settings[0].Path); err != nil {
			missing = true
			return nil
		}
		changed := func() (n int) {
			for _, s := range settings {
				_, changed, err := s.Apply("")
				if changed {
					n++
				}
				if s.Path == maxFile && err == nil {
					t.Error("the limit of the machine was set")
				}
			}
			return n
		}
		if n := changed(); n != 3 {
			t.Errorf("%d parameters were set, want 3", n)
		}
		if n := changed(); n != 0 {
			t.Errorf("%d parameters were set again", n)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	netlab.Need(t, !missing, "nf_conntrack sysctls in network namespaces")
}
