package ruleset

import (
	"context"
	"errors"
)

// SyncAll syncs rules and then the followers, which report or count what is in effect, such as health-check node
// ports and metrics. It returns the error of rules if that brought nothing into effect. One Service that failed does
// not hold up the followers, nor does one follower the others.
//
// SyncAll returns all errors, joined. If only followers failed, [InEffect] returns true for the error, and its method
// NotReady makes a runner.Runner try again without taking it for a failure: another process may have a health-check
// node port for days.
func SyncAll(ctx context.Context, rules *Cursor, followers ...*Cursor) error {
	err := rules.Sync(ctx)
	if !InEffect(err) {
		return err
	}
	var following error
	for _, c := range followers {
		following = errors.Join(following, c.Sync(ctx))
	}
	if err == nil && following != nil {
		return lag{following}
	}
	return errors.Join(err, following)
}

// lag is the error of followers of rules that are in effect.
type lag struct{ error }

// Error implements error.
func (l lag) Error() string {
	return "the rules are in effect, but not what follows them: " + l.error.Error()
}

// Unwrap returns the errors of the followers.
func (l lag) Unwrap() error { return l.error }

// NotReady makes runner.IsNotReady return true.
func (lag) NotReady() bool { return true }

// InEffect reports whether, after a [Cursor.Sync] or [SyncAll] that returned err, everything but single Services is
// in effect: err is nil, a [*PartialError], perhaps wrapped, or one of followers alone, and does not wrap
// [ErrNeedFull].
func InEffect(err error) bool {
	if l := (lag{}); errors.As(err, &l) {
		return true
	}
	return err == nil || errors.As(err, new(*PartialError)) && !errors.Is(err, ErrNeedFull)
}
