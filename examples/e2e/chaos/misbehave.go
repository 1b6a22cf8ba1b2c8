//go:build linux

package main

import (
	"net/http"
	"slices"
	"time"
)

// misbehavior is how an API server misbehaves. Its fields are protected by the API server's lock.
type misbehavior struct {
	// fail is how many requests are answered with an error.
	fail int
	// retype sends ADDED for some changes of existing objects, and MODIFIED for some new
	// ones. duplicate sends some events twice.
	retype, duplicate bool
	// bookmarks sends a bookmark after each group of events.
	bookmarks bool
	// slow sends events in pieces of a few bytes.
	slow bool
	// stream allows lists as watches (sendInitialEvents).
	stream bool
}

// behave ends all misbehavior except that of stream, which is a property of a version.
func (s *apiServer) behave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.misbehavior = misbehavior{stream: s.stream}
}

// misbehave changes how the API server misbehaves.
func (s *apiServer) misbehave(f func(*misbehavior)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.misbehavior)
}

// now returns how the API server misbehaves.
func (s *apiServer) now() misbehavior {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.misbehavior
}

// endWatches ends all watches. If expire is set, they cannot be resumed.
func (s *apiServer) endWatches(expire bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generation++
	if expire {
		s.version++
		s.floor = s.version
		clear(s.history)
	}
	s.cond.Broadcast()
}

// failed answers a request with an error if it is to fail.
func (s *apiServer) failed(w http.ResponseWriter) bool {
	s.mu.Lock()
	if s.fail == 0 {
		s.mu.Unlock()
		return false
	}
	s.fail--
	status := []int{http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable, http.StatusGatewayTimeout}[s.rng.IntN(4)]
	abort := s.rng.IntN(3) == 0
	s.mu.Unlock()
	if abort {
		panic(http.ErrAbortHandler)
	}
	if status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	writeStatus(w, status, "InternalError")
	return true
}

// pieces splits text for a slow server.
func (s *apiServer) pieces(text []byte) (out [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.slow {
		return [][]byte{text}
	}
	for len(text) > 0 {
		n := min(len(text), 1+s.rng.IntN(60))
		out, text = append(out, slices.Clone(text[:n])), text[n:]
	}
	return out
}

// pieceDelay is the pause between two pieces.
const pieceDelay = 200 * time.Microsecond
