package conntrack_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/netlab"
)

// TestTuneKernel sets the timeouts of a network namespace of its own, and asks for
// the limit, which only the initial namespace may set.
func TestTuneKernel(t *testing.T) {
	h := netlab.NewHost(t)
	missing := false
	err := h.Do(func() error {
		// The namespace's own conntrack parameters are there once it is in use.
		c, err := conntrack.New(conntrack.Config{})
		if err != nil {
			return err
		}
		defer c.Close()
		settings, err := conntrack.Tuning{
			MaxPerCore: 1, Min: 12345,
			TCPEstablishedTimeout: 23 * time.Hour, UDPStreamTimeout: 77 * time.Second, TCPBeLiberal: true,
		}.Settings(1)
		if err != nil {
			return err
		}
		if _, err := os.Stat("/" + settings[0].Path); err != nil {
			missing = true
			return nil
		}
		done, err := conntrack.Tune("", settings)
		if len(done) != 3 {
			t.Errorf("set %v", done)
		}
		var s *conntrack.SettingError
		if !errors.As(err, &s) || s.Setting.Path != maxFile || !s.ReadOnly() {
			t.Errorf("the limit of the machine: error %v", err)
		}
		if done, _ := conntrack.Tune("", settings); len(done) != 0 {
			t.Errorf("set again: %v", done)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	netlab.Need(t, !missing, "nf_conntrack sysctls in network namespaces")
}
