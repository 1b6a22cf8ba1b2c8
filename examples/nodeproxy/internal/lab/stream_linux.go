package lab

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Tally counts the answers of each server, and collects the sources that it saw.
type Tally struct {
	Answers map[string]int             // by server
	Sources map[string]map[string]bool // by server
	Errs    []error
}

// result is what became of a connection.
type result struct {
	began        time.Time
	name, source string
	err          error
}

func tally(results []result) *Tally {
	y := &Tally{Answers: map[string]int{}, Sources: map[string]map[string]bool{}}
	for _, r := range results {
		if r.err != nil {
			y.Errs = append(y.Errs, r.err)
			continue
		}
		y.Answers[r.name]++
		if y.Sources[r.name] == nil {
			y.Sources[r.name] = map[string]bool{}
		}
		y.Sources[r.name][r.source] = true
	}
	return y
}

// Visits makes n connections, or fewer if connections fail.
func Visits(h *netlab.Host, from, to string, n int) *Tally {
	var all []result
	for range n {
		name, source, err := Visit(h, from, to)
		if all = append(all, result{time.Time{}, name, source, err}); err != nil {
			break
		}
	}
	return tally(all)
}

// Answered reports whether there was no error and exactly these servers answered.
func (y *Tally) Answered(names ...string) bool {
	return len(y.Errs) == 0 && slices.Equal(slices.Sorted(maps.Keys(y.Answers)), names)
}

// Saw reports whether a server saw only that source.
func (y *Tally) Saw(name, source string) bool {
	return len(y.Sources[name]) == 1 && y.Sources[name][source]
}

// String returns the distribution, and the first error, if any.
func (y *Tally) String() string {
	var b strings.Builder
	for i, name := range slices.Sorted(maps.Keys(y.Answers)) {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %d", name, y.Answers[name])
	}
	if n := len(y.Errs); n > 0 {
		fmt.Fprintf(&b, "; %d failed, first: %v", n, y.Errs[0])
	}
	return b.String()
}

// SourceList returns all sources that the servers saw.
func (y *Tally) SourceList() string {
	all := map[string]bool{}
	for _, s := range y.Sources {
		maps.Copy(all, s)
	}
	return strings.Join(slices.Sorted(maps.Keys(all)), " and ")
}

// Stream opens connections from two hosts until it is stopped.
type Stream struct {
	Visit func(h *netlab.Host, from, to string) (name, source string, err error)
	// Pause is the time between two connections of a host.
	Pause time.Duration

	mu      sync.Mutex
	results []result // of all connections that ended
	quit    bool
	wg      sync.WaitGroup
}

func NewStream(a *netlab.Host, toA string, b *netlab.Host, toB string) *Stream {
	return StartStream(&Stream{Visit: Visit}, a, toA, b, toB)
}

func StartStream(s *Stream, a *netlab.Host, toA string, b *netlab.Host, toB string) *Stream {
	s.wg.Go(func() { s.loop(a, toA) })
	s.wg.Go(func() { s.loop(b, toB) })
	return s
}

func (s *Stream) loop(h *netlab.Host, to string) {
	for quit := false; !quit; time.Sleep(s.Pause) {
		r := result{began: time.Now()}
		r.name, r.source, r.err = s.Visit(h, "", to)
		s.mu.Lock()
		s.results = append(s.results, r)
		quit = s.quit
		s.mu.Unlock()
	}
}

// since returns the results behind the first n.
func (s *Stream) since(n int) []result {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.results[n:]
}

// Next returns the results of n connections that begin after the call.
func (s *Stream) Next(n int) *Tally {
	before, now := len(s.since(0)), time.Now()
	for ; ; time.Sleep(time.Millisecond) {
		later := slices.DeleteFunc(slices.Clone(s.since(before)), func(r result) bool { return r.began.Before(now) })
		if len(later) >= n {
			return tally(later)
		}
	}
}

// Errs returns the errors of all connections so far.
func (s *Stream) Errs() []error { return tally(s.since(0)).Errs }

// Stop ends the stream and returns the results of all connections.
func (s *Stream) Stop() *Tally {
	s.mu.Lock()
	s.quit = true
	s.mu.Unlock()
	s.wg.Wait()
	return tally(s.results)
}

func IsTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
