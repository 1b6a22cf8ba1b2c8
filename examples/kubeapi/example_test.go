package kubeapi_test

import (
	"context"
	"log/slog"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	componentbase "k8s.io/component-base/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/tracker"
)

// Follow feeds a tracker from the API server.
func ExampleFollow() {
	const nodeName = "n1"
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: nodeName}})
	if err != nil {
		panic(err)
	}
	config, err := kubeapi.ClientConfig(componentbase.ClientConnectionConfiguration{Kubeconfig: "/etc/kubernetes/proxy.conf"}, "")
	if err != nil {
		panic(err)
	}
	client, err := kubeapi.NewClient(config)
	if err != nil {
		panic(err)
	}
	sources := map[kubeapi.Source]tracker.Kind{
		kubeapi.Services: tracker.KindServices, kubeapi.Slices: tracker.KindSlices, kubeapi.Nodes: tracker.KindNodes,
	}
	kubeapi.Follow(context.Background(), client, tracker.Selector{}, nodeName, kubeapi.Handler{
		SetService:        func(s *v1.Service) { t.SetService(s) },
		DeleteService:     func(n types.NamespacedName) { t.DeleteService(n) },
		SetSlice:          func(es *discovery.EndpointSlice) { t.SetSlice(es) },
		DeleteSlice:       func(n types.NamespacedName) { t.DeleteSlice(n) },
		SetNode:           func(n *v1.Node) { t.SetNode(tracker.NodeInfoOf(n)) },
		DeleteNode:        func() { t.SetNode(tracker.NodeInfo{Name: nodeName}) },
		SetServiceCIDR:    func(*networking.ServiceCIDR) {},
		DeleteServiceCIDR: func(string) {},
		Synced: func(s kubeapi.Source) {
			if source, ok := sources[s]; ok {
				t.MarkSynced(source)
			}
		},
	}, slog.Default())
}
