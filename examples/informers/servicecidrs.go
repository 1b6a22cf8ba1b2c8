package informers

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"

	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
)

// serviceCIDRs returns the source of ServiceCIDRs, whose ranges it passes to the Engine together. The
// tracker does not wait for it, because the API server may not have any.
func (c Config) serviceCIDRs(r *apiretry.Retrier) source {
	var mu sync.Mutex
	ranges := map[string][]netip.Prefix{}
	change := func(f func()) {
		mu.Lock()
		defer mu.Unlock()
		f()
		c.Engine.SetServiceCIDRs(slices.Concat(slices.Collect(maps.Values(ranges))...))
	}
	return source{
		informer: c.ServiceCIDRs,
		handler: handler(
			func(o *networking.ServiceCIDR) { change(func() { ranges[o.Name] = apiretry.Ranges(o, c.Log) }) },
			func(n types.NamespacedName, _ *networking.ServiceCIDR) { change(func() { delete(ranges, n.Name) }) },
		),
		await: func(ctx context.Context) {
			apiretry.ReadableCIDRs(ctx, c.Log, func(ctx context.Context) error {
				_, err := c.Client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{Limit: 1})
				return err
			})
		},
		make: func() cache.SharedInformer {
			return informer(c, r, "servicecidrs", &networking.ServiceCIDR{}, c.Client.NetworkingV1().ServiceCIDRs(), "", "")
		},
		synced: func() {},
	}
}
