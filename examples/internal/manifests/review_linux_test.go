package manifests_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// TestReviewsAgreeWithAnAPIServer creates each object of reviews in an API server. It refuses
// those that the Reader says it would, and sets what the Reader says it lacks.
func TestReviewsAgreeWithAnAPIServer(t *testing.T) {
	host := netlab.NewHost(t)
	host.Addrs("lo", "10.0.0.2/32")
	s := controlplane.New(t, controlplane.Config{Host: host, Address: "10.0.0.2"})
	for _, r := range reviews {
		o := readReview(t, r.spec).Set[0]
		body := must.Get(json.Marshal(o.Value))(t)
		path := map[manifests.Kind]string{
			manifests.Service:       "/api/v1/namespaces/default/services",
			manifests.EndpointSlice: "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
			manifests.ServiceCIDR:   "/apis/networking.k8s.io/v1/servicecidrs",
		}[o.Kind]
		answer, err := s.Request(t.Context(), "POST", path, body)
		if err == nil {
			if _, err := s.Request(t.Context(), "DELETE", path+"/"+o.Name, nil); err != nil {
				t.Error(err)
			}
		}
		if refuses := strings.Contains(r.want, "would refuse it"); refuses != (err != nil) {
			t.Errorf("%s: the API server answers %s, error %v; the Reader says %q", r.name, answer, err, r.want)
		}
		if _, field, sets := strings.Cut(r.want, "lacks: "); sets && err == nil {
			field = field[strings.LastIndex(field, " ")+1:]
			if strings.Contains(string(body), `"`+field+`"`) || !strings.Contains(string(answer), `"`+field+`"`) {
				t.Errorf("%s: field %s in %s\nanswer %s", r.name, field, body, answer)
			}
		}
	}
}
