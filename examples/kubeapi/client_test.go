package kubeapi

import (
	"errors"
	"testing"

	componentbase "k8s.io/component-base/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/textfile"
)

// TestConfigurationThatWouldBlockIsRefused names a folder where a file is expected: like a pipe, it is no regular file.
func TestConfigurationThatWouldBlockIsRefused(t *testing.T) {
	_, err := ClientConfig(componentbase.ClientConnectionConfiguration{Kubeconfig: t.TempDir()}, "")
	if !errors.Is(err, textfile.ErrNotRegular) {
		t.Errorf("error %v, want %v", err, textfile.ErrNotRegular)
	}
}
