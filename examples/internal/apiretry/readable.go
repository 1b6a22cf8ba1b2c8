package apiretry

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// absentInterval is the time between two attempts to read a resource that does not exist or is forbidden.
const absentInterval = 10 * time.Minute

// ReadableCIDRs waits until ServiceCIDRs can be read, or ctx ends. list makes one request for them. An
// API server before Kubernetes 1.33 does not have them. That they do not exist or are forbidden is
// logged once, and absent is called once.
func ReadableCIDRs(ctx context.Context, log *slog.Logger, list func(context.Context) error, absent func()) {
	for logged := false; ; {
		asking, cancel := context.WithTimeout(ctx, firstByte)
		err := list(asking)
		cancel()
		wait := 5 * time.Second
		if err == nil {
			return
		}
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			if wait = absentInterval; !logged {
				logged = true
				absent()
				log.Info("cannot read ServiceCIDRs: packets to cluster IPs that no Service has are not dropped", "error", err)
			}
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
