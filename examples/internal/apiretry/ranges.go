package apiretry

import (
	"log/slog"
	"net/netip"

	networking "k8s.io/api/networking/v1"
)

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
