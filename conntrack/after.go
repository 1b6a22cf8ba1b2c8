package conntrack

import (
	"context"
	"log/slog"

	"github.com/go-proxier/proxier/ruleset"
)

// After returns a backend that applies b and then flushes c with the changes that b
// acknowledged. So no flow is deleted before its packets would meet the new rules. The
// result's Apply returns the error of b's Apply, even if the clean-up fails. A failed
// clean-up is logged, reported to [Trace], and kept for the next Apply or c.Flush. The
// package documentation shows how to retry it soon. If b's Apply fails altogether, there
// is no clean-up. The result has the limits of b ([ruleset.Limiter]). Neither b nor c may
// be nil.
func After(b ruleset.Backend, c *Cleaner) ruleset.Backend {
	return ruleset.WithLimitsOf(b, ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		err := b.Apply(ctx, d)
		c.Record(d, err)
		if _, acked := outcome(err); !acked {
			return err
		}
		if err := c.Flush(ctx); err != nil && ctx.Err() == nil {
			c.log.LogAttrs(ctx, slog.LevelWarn, "conntrack: cannot delete stale UDP flows, the next sync tries again", slog.Any("error", err))
		}
		return err
	}))
}
