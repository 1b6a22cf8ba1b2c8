package core

import (
	"context"
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Pauses after failures to remove the taint, before the random part, which adds up to the same time
// again.
const (
	firstTaintPause   = time.Second
	longestTaintPause = time.Minute
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

// run removes the taint whenever the object has it, until ctx ends. After a failure it pauses, longer
// each time, and tries again with the latest version of the object.
func (s *startupTaint) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.wake:
		}
		pauses := wait.Backoff{Duration: firstTaintPause, Factor: 2, Jitter: 1, Steps: math.MaxInt, Cap: longestTaintPause}
		for failures := 0; ; failures++ {
			n := s.node.Load()
			if !slices.ContainsFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == s.key }) {
				break
			}
			err := s.remove(ctx, n, s.key)
			if err == nil {
				s.log.Info("removed the startup taint of the node", "taint", s.key)
				s.event(false, reasonTaintRemoved, "Services work: removed the taint "+s.key)
				break
			}
			s.report(err, failures, pauses.Duration)
			if err := sleep(ctx, pauses.Step()); err != nil {
				return err
			}
		}
	}
}

// report logs the first failure and those with the longest pause. It ignores a failure because the
// taints changed, unless such failures persist.
func (s *startupTaint) report(err error, failures int, pause time.Duration) {
	switch changed := apierrors.IsInvalid(err) || apierrors.IsNotFound(err); {
	case failures == 0 && !changed, failures == 1 && changed, pause == longestTaintPause:
		s.log.Warn("cannot remove the startup taint of the node; trying again", "taint", s.key, "error", err)
	}
	if failures == 0 && apierrors.IsForbidden(err) {
		s.event(true, reasonTaintStays, "cannot remove the taint "+s.key+": the agent needs the right to patch nodes")
	}
}
