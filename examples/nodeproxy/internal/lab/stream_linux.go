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
	"github.com/go-proxier/proxier/internal/testing/stall"
)

// Tally counts the answers of each server, and collects the sources that it saw.
type Tally struct {
	Answers map[string]int             // by server
	Sources map[string]map[string]bool // by server
	Errs    []error
}

func newTally() *Tally {
	return &Tally{Answers: map[string]int{}, Sources: map[string]map[string]bool{}}
}

func (y *Tally) add(name, source string, err error) {
	if err != nil {
		y.Errs = append(y.Errs, err)
		return
	}
	y.Answers[name]++
	if y.Sources[name] == nil {
		y.Sources[name] = map[string]bool{}
	}
	y.Sources[name][source] = true
}

// Visits makes n connections, or fewer if connections fail.
func Visits(h *netlab.Host, from, to string, n int) *Tally {
	y := newTally()
	for i := 0; i < n && len(y.Errs) == 0; i++ {
		y.add(Visit(h, from, to))
	}
	return y
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
	mu    sync.Mutex
	moved *sync.Cond
	// all counts every connection, and since the connections that began after the last
	// call of next.
	all, since *Tally
	round, n   int
	quit       bool
	Visit      func(h *netlab.Host, from, to string) (name, source string, err error)
	// Pause is the time between two connections of a host.
	Pause time.Duration
	// Stalls, if not nil, excuses connections that fail while the machine stands still.
	Stalls  *stall.Detector
	excused int
	wg      sync.WaitGroup
}

func NewStream(a *netlab.Host, toA string, b *netlab.Host, toB string) *Stream {
	return StartStream(&Stream{Visit: Visit}, a, toA, b, toB)
}

func StartStream(s *Stream, a *netlab.Host, toA string, b *netlab.Host, toB string) *Stream {
	s.all, s.since = newTally(), newTally()
	s.moved = sync.NewCond(&s.mu)
	s.wg.Go(func() { s.loop(a, toA) })
	s.wg.Go(func() { s.loop(b, toB) })
	return s
}

func (s *Stream) loop(h *netlab.Host, to string) {
	for {
		s.mu.Lock()
		round, quit := s.round, s.quit
		s.mu.Unlock()
		if quit {
			return
		}
		time.Sleep(s.Pause)
		begin := time.Now()
		name, source, err := s.Visit(h, "", to)
		excuse := err != nil && s.Stalls != nil && s.Stalls.Since(begin)
		s.mu.Lock()
		if excuse {
			s.excused++
			s.mu.Unlock()
			continue
		}
		s.all.add(name, source, err)
		if round == s.round {
			s.since.add(name, source, err)
			s.n++
		}
		s.moved.Broadcast()
		s.mu.Unlock()
	}
}

// Next returns the results of n connections that begin after the call.
func (s *Stream) Next(n int) *Tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.round++
	s.since, s.n = newTally(), 0
	for s.n < n {
		s.moved.Wait()
	}
	s.round++ // ends the tally that is returned
	done := s.since
	s.since = newTally()
	return done
}

// TakeErrs returns the errors of all connections since the last call.
func (s *Stream) TakeErrs() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := s.all.Errs
	s.all.Errs = nil
	return errs
}

// Excused returns the number of failed connections that were excused.
func (s *Stream) Excused() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.excused
}

// Stop ends the stream and returns the results of all connections.
func (s *Stream) Stop() *Tally {
	s.mu.Lock()
	s.quit = true
	s.mu.Unlock()
	s.wg.Wait()
	return s.all
}

func IsTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
