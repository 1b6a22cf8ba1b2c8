package ruleset_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// hardware marks the Services that the node's network card forwards.
type hardware struct{}

func (hardware) Equal(o tracker.Extension) bool { return o == hardware{} }

// Two data planes divide the Services by an annotation. Both Services ask for the same external IP.
// The first one has it, in whichever plane it is.
func ExampleEngine_AttachPart() {
	t, err := tracker.New(tracker.Config{
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			if s.Annotations["example.com/plane"] == "hardware" {
				p.Ext = hardware{}
			}
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		fmt.Println(err)
		return
	}
	plane := func(name string) ruleset.Backend {
		return ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
			for _, c := range d.Changes {
				for f := range c.GoneFrontends() {
					fmt.Println(name, "deletes", f.Addr, "of", c.Key.Name)
				}
				for i := 0; c.New != nil && i < len(c.New.Frontends); i++ {
					fmt.Println(name, "writes", c.New.Frontends[i].Addr, "of", c.Key.Name)
				}
			}
			return nil
		})
	}
	inHardware := func(s *ruleset.Port) bool { return s.Spec.Ext == hardware{} }
	cursors := []*ruleset.Cursor{
		engine.AttachPart("hardware", plane("hardware"), inHardware),
		engine.AttachPart("software", plane("software"), func(s *ruleset.Port) bool { return !inHardware(s) }),
	}
	set := func(name, clusterIP, plane string) {
		t.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Annotations: map[string]string{"example.com/plane": plane}},
			Spec: v1.ServiceSpec{
				ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
				ExternalIPs: []string{"192.0.2.1"},
				Ports:       []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}},
			},
		})
		for _, c := range cursors {
			if err := c.Sync(context.Background()); err != nil {
				fmt.Println(err)
			}
		}
	}
	set("api", "172.30.0.1", "hardware")
	set("web", "172.30.0.2", "software")
	fmt.Println("api moves:")
	set("api", "172.30.0.1", "software")
	// Output:
	// hardware writes 172.30.0.1 of api
	// hardware writes 192.0.2.1 of api
	// software writes 172.30.0.2 of web
	// api moves:
	// hardware deletes 172.30.0.1 of api
	// hardware deletes 192.0.2.1 of api
	// software writes 172.30.0.1 of api
	// software writes 192.0.2.1 of api
}
