//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

type object interface {
	metav1.Object
	runtime.Object
}

// resource is the plural name of a kind of objects.
type resource string

const (
	services     resource = "services"
	slicesOf     resource = "endpointslices"
	nodes        resource = "nodes"
	serviceCIDRs resource = "servicecidrs"
)

var kinds = map[resource]metav1.TypeMeta{
	services:     {APIVersion: "v1", Kind: "Service"},
	slicesOf:     {APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
	nodes:        {APIVersion: "v1", Kind: "Node"},
	serviceCIDRs: {APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"},
}

// key is the name of an object among those of its resource.
func key(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// apiServer is an API server in memory that can misbehave. Its methods are safe for concurrent
// use.
type apiServer struct {
	misbehavior
	// stream allows lists as watches (sendInitialEvents).
	stream bool

	mu   sync.Mutex
	cond *sync.Cond
	rng  *rand.Rand
	// version is the resource version of the latest change.
	version int64
	objects map[resource]map[string]object
	history map[resource][]event
	// Watches that start before floor have expired. Watches of an earlier generation end.
	floor, generation int64
	// lose reports that a change is withheld from all watches. It may be nil.
	lose func() bool
	// announce, if not nil, is called with each object, nil for a deleted one, before a client can see
	// the change.
	announce func(r resource, name string, o object)

	server http.Server
}

// event is a change of an object.
type event struct {
	version int64
	kind    string
	object  json.RawMessage
}

func newAPIServer(seed uint64) *apiServer {
	s := &apiServer{
		rng: rand.New(rand.NewPCG(seed, 0x617069)), version: 100,
		objects: map[resource]map[string]object{}, history: map[resource][]event{},
	}
	for r := range kinds {
		s.objects[r] = map[string]object{}
	}
	s.cond = sync.NewCond(&s.mu)
	s.server = http.Server{Handler: s}
	s.server.SetKeepAlivesEnabled(false) // an agent's idle connections are no leak
	return s
}

// apiAddress is an address of the node, as on a node of the control plane.
const apiAddress = nodeAddr4 + ":6443"

// serve answers requests on a host until close.
func (s *apiServer) serve(h *netlab.Host) error {
	l, err := h.Listen("tcp", apiAddress)
	if err != nil {
		return err
	}
	go s.server.Serve(l)
	return nil
}

func (s *apiServer) close() {
	s.endWatches(false)
	s.server.Close()
}

// set creates or replaces an object. It does not modify o. Only one goroutine may call set and delete.
func (s *apiServer) set(r resource, o object) {
	s.mu.Lock()
	old, version := s.objects[r][key(o)], s.version+1
	s.mu.Unlock()
	o = o.DeepCopyObject().(object)
	o.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(kinds[r].APIVersion, kinds[r].Kind))
	o.SetResourceVersion(fmt.Sprint(version))
	kind := "MODIFIED"
	if old != nil {
		o.SetUID(old.GetUID())
		o.SetCreationTimestamp(old.GetCreationTimestamp())
	} else {
		kind = "ADDED"
		o.SetUID(types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", version)))
		// The times of Services decide conflicts. Some are equal.
		o.SetCreationTimestamp(metav1.Unix(1700000000+version/4, 0))
	}
	if s.announce != nil {
		s.announce(r, key(o), o)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version, s.objects[r][key(o)] = version, o
	s.publish(r, kind, o)
}

// delete deletes an object if it exists.
func (s *apiServer) delete(r resource, name string) {
	s.mu.Lock()
	o := s.objects[r][name]
	s.mu.Unlock()
	if o == nil {
		return
	}
	if s.announce != nil {
		s.announce(r, name, nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.objects[r], name)
	s.version++
	o = o.DeepCopyObject().(object)
	o.SetResourceVersion(fmt.Sprint(s.version))
	s.publish(r, "DELETED", o)
}

// publish sends an event to watches. The caller holds the lock.
func (s *apiServer) publish(r resource, kind string, o object) {
	if s.lose != nil && s.lose() {
		return
	}
	text := encode(o)
	if kind != "DELETED" && s.retype && s.rng.IntN(3) == 0 {
		kind = []string{"ADDED", "MODIFIED"}[s.rng.IntN(2)]
	}
	s.history[r] = append(s.history[r], event{s.version, kind, text})
	if s.duplicate && s.rng.IntN(3) == 0 {
		s.history[r] = append(s.history[r], event{s.version, kind, text})
	}
	s.cond.Broadcast()
}

func encode(o any) json.RawMessage {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // all types can be encoded
	}
	return text
}

// names lists the names of a resource's objects in order.
func (s *apiServer) names(r resource) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.objects[r]))
}

// dump returns all objects as JSON.
func (s *apiServer) dump() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, err := json.MarshalIndent(s.objects, "", " ")
	if err != nil {
		panic(err) // all types can be encoded
	}
	return text
}

// shuffled returns the objects of a resource as JSON in random order, and their version.
func (s *apiServer) shuffled(r resource) (list []json.RawMessage, version int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(s.objects[r])) {
		list = append(list, encode(s.objects[r][name]))
	}
	s.rng.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list, s.version
}

// next waits for events of a resource after a version. more is false if the watch has ended: its
// generation is over, its events were dropped, or done reports true.
func (s *apiServer) next(r resource, after, generation int64, done func() bool) (list []event, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if after < s.floor {
			return nil, false
		}
		h := s.history[r]
		i, _ := slices.BinarySearchFunc(h, after+1, func(e event, v int64) int { return cmp.Compare(e.version, v) })
		if i < len(h) {
			return slices.Clone(h[i:]), true
		}
		if s.generation != generation || done() {
			return nil, false
		}
		s.cond.Wait()
	}
}

// wake makes watches look whether they are done.
func (s *apiServer) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cond.Broadcast()
}

// chance returns true with probability 1/n.
func (s *apiServer) chance(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.IntN(n) == 0
}

// misbehavior is how an API server misbehaves. Its fields are protected by the API server's lock.
type misbehavior struct {
	// fail is how many requests are answered with an error.
	fail int
	// retype sends ADDED for some changes of existing objects, and MODIFIED for some new
	// ones. duplicate sends some events twice.
	retype, duplicate bool
}

// behave ends all misbehavior.
func (s *apiServer) behave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.misbehavior = misbehavior{}
}

func (s *apiServer) misbehave(f func(*misbehavior)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.misbehavior)
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
