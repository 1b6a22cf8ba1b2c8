//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// Outages is the measurement of all proxies at the same time, while the API server is killed and
// started again. Only the smallest number of Services is measured.
type Outages struct {
	Services int `json:"services"`
	// Seconds is the length of an outage, from the kill to the new start.
	Seconds float64   `json:"seconds"`
	Proxies []Outlive `json:"proxies"`
}

// Outlive is one proxy's return after outages.
type Outlive struct {
	Proxy         string `json:"proxy"`
	Version       string `json:"version,omitempty"`
	MinSyncPeriod string `json:"minSyncPeriod,omitempty"`
	Mode          string `json:"mode"`
	// FollowedSeconds has the time of each outage from the moment when the API server is ready
	// again until a change that was made then is in effect.
	FollowedSeconds []float64 `json:"followedSeconds"`
	// Failed is the error that ended the measurement.
	Failed string `json:"failed,omitempty"`
}

// followTimeout bounds the time until a proxy follows the API server again.
const followTimeout = 3 * time.Minute

// outages measures outages. The proxies were started by measurements of runs.
func (c *control) outages(ctx context.Context, o *options, all []*measurement) (*Outages, error) {
	r := &Outages{Services: c.services, Seconds: o.outage.Seconds()}
	for _, m := range all {
		r.Proxies = append(r.Proxies, Outlive{Proxy: m.run.Proxy, Version: m.run.Version, MinSyncPeriod: m.run.MinSyncPeriod, Mode: m.run.Mode})
	}
	for i := range o.outages {
		progress("all proxies, %d Services: outage %d", c.services, i+1)
		c.server.Kill()
		pause(ctx, o.outage)
		if err := c.server.Run(ctx); err != nil {
			return r, err
		}
		ready := time.Now()
		const service = 0
		set, err := c.change(ctx, service)
		if err != nil {
			return r, err
		}
		var wg sync.WaitGroup
		for i, m := range all {
			p := &r.Proxies[i]
			if p.Failed != "" {
				continue
			}
			wg.Go(func() {
				if err := m.follows(ctx, service, set, ready.Add(followTimeout)); err != nil {
					p.Failed = err.Error()
					return
				}
				p.FollowedSeconds = append(p.FollowedSeconds, time.Since(ready).Seconds())
			})
		}
		wg.Wait()
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
	}
	return r, nil
}

// follows waits until a change is in effect. Unlike arrives it pauses between attempts, because
// the wait is long and the machine has other work.
func (m *measurement) follows(ctx context.Context, service, set int, end time.Time) error {
	for {
		err := m.node.host.Do(func() error { return arrives(ctx, service, set, time.Now()) })
		if err == nil || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
		pause(ctx, 10*time.Millisecond)
	}
}

// markdown writes a line for each proxy.
func (r *Outages) markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\nSeconds from the return of an API server that was away for %s until a change that was made then is in effect, with %s Services and all proxies at the same time:\n\n",
		time.Duration(r.Seconds*float64(time.Second)), thousands(r.Services))
	for _, p := range r.Proxies {
		var list []string
		for _, s := range p.FollowedSeconds {
			list = append(list, fmt.Sprintf("%.1f", s))
		}
		if p.Failed != "" {
			list = append(list, "failed: "+p.Failed)
		}
		run := Run{Proxy: p.Proxy, MinSyncPeriod: p.MinSyncPeriod}
		fmt.Fprintf(&b, "- %s, %s: %s\n", run.title(), p.Mode, strings.Join(list, ", "))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
