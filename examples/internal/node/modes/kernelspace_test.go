package modes

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/tracker"
)

func TestPreserveDestinationIsReadOnWindows(t *testing.T) {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{winkernel.PreserveDestination: "true"}}}
	var p tracker.ServicePort
	if Kernelspace(&config.Config{}).OnService(s, &p); !p.NeedLocalSet {
		t.Error("the annotation has no effect")
	}
}
