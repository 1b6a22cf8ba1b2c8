package apiretry

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// absentInterval is the time between two attempts to read a resource that does not exist or is forbidden.
const absentInterval = 10 * time.Minute

// readable waits until a resource can be read, or ctx ends. That it does not exist or is forbidden is logged once,
// and absent is called once.
func (r *Retrier) readable(ctx context.Context, resource string, requests *cache.ListWatch, absent func()) {
	for logged := false; ; {
		asking, cancel := context.WithTimeout(ctx, firstByte)
		_, err := requests.ListWithContext(asking, metav1.ListOptions{Limit: 1})
		cancel()
		wait := 5 * time.Second
		switch {
		case err == nil:
			return
		case apierrors.IsNotFound(err) || apierrors.IsForbidden(err):
			if wait = absentInterval; !logged {
				logged = true
				absent()
				r.log.Info("cannot read ServiceCIDRs: packets to cluster IPs that no Service has are not dropped", "error", err)
			}
		case r.Failed != nil:
			r.Failed(resource, err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// Ranges returns the ranges of a ServiceCIDR. It skips and logs those that cannot be read.
func Ranges(o *networking.ServiceCIDR, log *slog.Logger) (out []netip.Prefix) {
	for _, s := range o.Spec.CIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			log.Warn("skipped a range of a ServiceCIDR", "serviceCIDR", o.Name, "error", err)
			continue
		}
		out = append(out, p)
	}
	return out
}
