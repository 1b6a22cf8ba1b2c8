package conntrack

import (
	"context"
	"log/slog"

	"github.com/go-proxier/proxier/ruleset"
)

// After returns a backend that applies b and then has c clean up after what b
// acknowledged, so that no flow is deleted before its packets would meet the new
// rules. The result's Apply returns what b's does, whatever became of the
// clean-up: rules in effect are in effect. A clean-up that failed is logged, reported
// to [Trace], and kept for the next Apply, or for c.Flush; see the package
// documentation for how to have that retried soon. An Apply that failed altogether
// is not followed by a clean-up. The result has the limits of b ([ruleset.Limiter]).
// Neither b nor c may be nil.
func After(b ruleset.Backend, c *Cleaner) ruleset.Backend {
	return ruleset.WithLimitsOf(b, ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		err := b.Apply(ctx, d)
		c.Record(d, err)
		if _, acked := outcome(err); !acked {
			return err
		}
		if err := c.Flush(ctx); err != nil && ctx.Err() == nil {
			c.log.LogAttrs(ctx, slog.LevelWarn, "stale UDP flows not cleaned up, to be tried again", slog.Any("error", err))
		}
		return err
	}))
}
