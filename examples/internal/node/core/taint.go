package core

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Pauses after failures to remove the taint, before the random part, which adds up to the same time
// again, and the time that the API server gets for an answer.
const (
	firstTaintPause   = time.Second
	longestTaintPause = time.Minute
	taintTimeout      = 10 * time.Second
)

// Reasons of Events about the taint.
const (
	reasonTaintRemoved = "StartupTaintRemoved"
	reasonTaintStays   = "StartupTaintNotRemoved"
)

// startupTaint removes a taint from the node's object. The agent starts run when the rules are in
// effect. It follows the object as long as the agent runs: a Node that is deleted and registers
// again has the taint again.
type startupTaint struct {
	key string
	// remove sends the request.
	remove func(ctx context.Context, n *v1.Node, key string) error
	// event writes an Event about the node.
	event func(warning bool, reason, message string)
	log   *slog.Logger

	node atomic.Pointer[v1.Node] // the latest version
	wake chan struct{}
}

// observe is called with each version of the node's object.
func (s *startupTaint) observe(n *v1.Node) {
	s.node.Store(n)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// tainted returns the latest version of the node's object if it has the taint, or nil.
func (s *startupTaint) tainted() *v1.Node {
	n := s.node.Load()
	if n == nil || !slices.ContainsFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == s.key }) {
		return nil
	}
	return n
}

// run removes the taint whenever the object has it, until ctx ends. After a failure it pauses, longer
// each time, and tries again with the latest version of the object.
func (s *startupTaint) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.wake:
		}
		for failures := 0; ; failures++ {
			n := s.tainted()
			if n == nil {
				break
			}
			err := s.try(ctx, n)
			if err == nil {
				s.log.Info("removed the startup taint of the node", "taint", s.key)
				s.event(false, reasonTaintRemoved, "Services work: removed the taint "+s.key)
				break // until the next version of the object
			}
			s.report(err, failures)
			d := taintPause(failures)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(d + rand.N(d)):
			}
		}
	}
}

// report logs the first failure and those with the longest pause. It ignores a failure because the
// taints changed, unless such failures persist.
func (s *startupTaint) report(err error, failures int) {
	switch changed := apierrors.IsInvalid(err) || apierrors.IsNotFound(err); {
	case failures == 0 && !changed, failures == 1 && changed, taintPause(failures) == longestTaintPause:
		s.log.Warn("cannot remove the startup taint of the node; trying again", "taint", s.key, "error", err)
	}
	if failures == 0 && apierrors.IsForbidden(err) {
		s.event(true, reasonTaintStays, "cannot remove the taint "+s.key+": the agent needs the right to patch nodes")
	}
}

func (s *startupTaint) try(ctx context.Context, n *v1.Node) error {
	ctx, cancel := context.WithTimeout(ctx, taintTimeout)
	defer cancel()
	return s.remove(ctx, n, s.key)
}

// taintPause returns the pause after a number of earlier failures, without its random part.
func taintPause(failures int) time.Duration {
	return min(firstTaintPause<<min(failures, 10), longestTaintPause)
}

// removeTaint removes the startup taint, if the configuration names one.
func (a *Agent) removeTaint(ctx context.Context) error {
	if a.taint == nil {
		return nil
	}
	return a.taint.run(ctx)
}
