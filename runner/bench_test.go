package runner_test

import (
	"context"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/runner"
)

// BenchmarkTrigger measures Trigger.
func BenchmarkTrigger(b *testing.B) {
	b.Run("pending", func(b *testing.B) { // a run is already requested
		r := benchRunner(b)
		b.ReportAllocs()
		for b.Loop() {
			r.Trigger()
		}
	})
	b.Run("pending/parallel", func(b *testing.B) {
		r := benchRunner(b)
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				r.Trigger()
			}
		})
	})
	b.Run("running", func(b *testing.B) { // while Run serves the triggers
		r := benchRunner(b)
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan struct{})
		go func() { r.Run(ctx); close(done) }()
		b.ReportAllocs()
		for b.Loop() {
			r.Trigger()
		}
		cancel()
		<-done
	})
}

// BenchmarkRun measures one trigger with its run.
func BenchmarkRun(b *testing.B) {
	ran := make(chan struct{})
	r := must.Get(runner.New(runner.Config{}, func(context.Context) error { ran <- struct{}{}; return nil }))(b)
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() { r.Run(ctx); close(done) }()
	b.ReportAllocs()
	for b.Loop() {
		r.Trigger()
		<-ran
	}
	cancel()
	<-done
}

func benchRunner(b *testing.B) *runner.Runner {
	b.Helper()
	r := must.Get(runner.New(runner.Config{}, func(context.Context) error { return nil }))(b)
	return r
}
