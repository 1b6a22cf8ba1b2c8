package sysctl_test

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/go-proxier/proxier/internal/sysctl"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func TestParametersOfTheNamespace(t *testing.T) {
	const name = "net/ipv4/conf/all/route_localnet"
	h, other := netlab.NewHost(t), netlab.NewHost(t)
	for _, value := range []string{"1", "1", "0"} {
		must.Do(t, h.Do(func() error { return sysctl.Set(name, value) }))
		var got string
		if err := h.Do(func() (err error) { got, err = sysctl.Get(name); return err }); err != nil || got != value {
			t.Errorf("%q, want %q, error %v", got, value, err)
		}
		if err := other.Do(func() (err error) { got, err = sysctl.Get(name); return err }); err != nil || got != "0" {
			t.Errorf("in another namespace: %q, error %v", got, err)
		}
	}
	if err := h.Do(func() error { return sysctl.Set("net/ipv4/none", "1") }); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a parameter that does not exist: %v", err)
	}
}
