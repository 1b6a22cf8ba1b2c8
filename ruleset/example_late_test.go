package ruleset_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// card is a backend for hardware that confirms a write some time after it was sent.
type card struct {
	trigger func()

	mu sync.Mutex
	// sent and confirmed hold versions, nil for a removal.
	sent, confirmed map[tracker.Key]*ruleset.Port
}

var errUnconfirmed = errors.New("sent, not confirmed yet")

func (c *card) Apply(_ context.Context, d *ruleset.Delta) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	failed := map[tracker.Key]error{}
	for _, ch := range d.Changes {
		if s, ok := c.confirmed[ch.Key]; ok && s == ch.New {
			delete(c.confirmed, ch.Key)
			continue
		}
		failed[ch.Key] = errUnconfirmed
		if s, ok := c.sent[ch.Key]; !ok || s != ch.New {
			delete(c.confirmed, ch.Key)
			c.sent[ch.Key] = ch.New
			time.AfterFunc(time.Millisecond, func() { c.confirm(ch.Key, ch.New) })
		}
	}
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// confirm is called by the hardware's driver.
func (c *card) confirm(k tracker.Key, s *ruleset.Port) {
	c.mu.Lock()
	if sent, ok := c.sent[k]; ok && sent == s {
		delete(c.sent, k)
		c.confirmed[k] = s
	}
	c.mu.Unlock()
	c.trigger()
}

// onlyUnconfirmed reports whether err, of a Sync, is only about Services that are not confirmed.
func onlyUnconfirmed(err error) bool {
	var p *ruleset.PartialError
	if !errors.As(err, &p) || len(p.Failed) == 0 {
		return false
	}
	for _, err := range p.Failed {
		if !errors.Is(err, errUnconfirmed) {
			return false
		}
	}
	return ruleset.InEffect(err)
}

// A data plane that learns of its success later reports a Service as failed until then, and
// triggers another Sync. So nothing that follows the cursor is ahead of the hardware.
func ExamplePartialError_unconfirmed() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := &card{sent: map[tracker.Key]*ruleset.Port{}, confirmed: map[tracker.Key]*ruleset.Port{}}
	cursor := engine.Attach("card", c)
	r, err := runner.New(runner.Config{Retry: time.Minute, Max: time.Hour}, func(ctx context.Context) error {
		err := cursor.Sync(ctx)
		s := cursor.Status(webKey)
		fmt.Printf("in effect: %t, error: %v\n", s.Port != nil, s.Err)
		if s.Port != nil {
			cancel()
		}
		if onlyUnconfirmed(err) {
			return nil // no failure: the card triggers the next Sync
		}
		return err
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	c.trigger = r.Trigger
	engine.Notify(r.Trigger)
	r.Trigger()
	fmt.Println(r.Run(ctx))
	// Output:
	// in effect: false, error: sent, not confirmed yet
	// in effect: true, error: <nil>
	// context canceled
}
