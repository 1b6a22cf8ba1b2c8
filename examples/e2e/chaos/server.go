//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"path"
	"slices"
	"strconv"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
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

var kinds = map[resource]schema.GroupVersionKind{
	services:     {Version: "v1", Kind: "Service"},
	slicesOf:     {Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"},
	nodes:        {Version: "v1", Kind: "Node"},
	serviceCIDRs: {Group: "networking.k8s.io", Version: "v1", Kind: "ServiceCIDR"},
}

// key is the name of an object among those of its resource.
func key(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// apiServer is an API server in memory that can misbehave. One goroutine changes objects; the other methods
// are safe for concurrent use.
type apiServer struct {
	// stream allows lists as watches (sendInitialEvents).
	stream bool
	// announce, if not nil, is called with each change before a client can see it.
	announce func(kind watch.EventType, o object)

	mu      sync.Mutex
	rng     *rand.Rand
	objects map[resource]map[string]object
	// log holds the changes in order. The number of a change, from 1, is its resource version.
	log []change
	// changed is closed at the next change.
	changed chan struct{}
	// Watches that start before the version floor have expired. Watches of an earlier generation end.
	floor, generation int
	misbehavior
}

// misbehavior is how an API server misbehaves.
type misbehavior struct {
	// fail is how many requests are answered with an error.
	fail int
	// retype sends ADDED for some changes of existing objects, and MODIFIED for some new
	// ones. duplicate sends some events twice.
	retype, duplicate bool
}

// change is a change of an object, as the event of a watch.
type change struct {
	of     resource
	Type   watch.EventType `json:"type"`
	Object json.RawMessage `json:"object"`
}

func newAPIServer(seed uint64) *apiServer {
	s := &apiServer{
		rng: rand.New(rand.NewPCG(seed, 0x617069)), log: make([]change, 1), changed: make(chan struct{}),
		objects: map[resource]map[string]object{},
	}
	for r := range kinds {
		s.objects[r] = map[string]object{}
	}
	return s
}

// apiAddress is an address of the node, as on a node of the control plane.
const apiAddress = nodeAddr4 + ":6443"

// locked calls f with the lock held and wakes all watches.
func (s *apiServer) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

// set creates or replaces an object. It does not modify o.
func (s *apiServer) set(r resource, o object) {
	o = o.DeepCopyObject().(object)
	o.GetObjectKind().SetGroupVersionKind(kinds[r])
	if old := s.objects[r][key(o)]; old != nil {
		o.SetUID(old.GetUID())
		o.SetCreationTimestamp(old.GetCreationTimestamp())
		s.change(r, watch.Modified, o)
		return
	}
	o.SetUID(types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", len(s.log))))
	// The times of Services decide conflicts. Some are equal.
	o.SetCreationTimestamp(metav1.Unix(1700000000+int64(len(s.log))/4, 0))
	s.change(r, watch.Added, o)
}

// delete deletes an object if it exists.
func (s *apiServer) delete(r resource, name string) {
	if o := s.objects[r][name]; o != nil {
		s.change(r, watch.Deleted, o.DeepCopyObject().(object))
	}
}

func (s *apiServer) change(r resource, kind watch.EventType, o object) {
	o.SetResourceVersion(fmt.Sprint(len(s.log) + 1))
	if s.announce != nil {
		s.announce(kind, o)
	}
	s.locked(func() {
		if s.objects[r][key(o)] = o; kind == watch.Deleted {
			delete(s.objects[r], key(o))
		}
		if kind != watch.Deleted && s.retype && s.rng.IntN(3) == 0 {
			kind = pick(s.rng, watch.Added, watch.Modified)
		}
		c := change{r, kind, encode(o)}
		s.log = append(s.log, c)
		if s.duplicate && s.rng.IntN(3) == 0 {
			s.log = append(s.log, c)
		}
	})
}

func encode(o any) json.RawMessage {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // all types can be encoded
	}
	return text
}

// names lists the names of a resource's objects in order.
func (s *apiServer) names(r resource) []string { return slices.Sorted(maps.Keys(s.objects[r])) }

// endWatches ends all watches. If expire is set, they cannot be resumed.
func (s *apiServer) endWatches(expire bool) {
	s.locked(func() {
		s.generation++
		if expire {
			clear(s.log)
			s.log = append(s.log, change{})
			s.floor = len(s.log)
		}
	})
}

// ServeHTTP answers lists, watches, and writes of Events.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	q, res := r.URL.Query(), resource(path.Base(r.URL.Path))
	initial := q.Get("sendInitialEvents") == "true"
	refuse := func(code int, reason metav1.StatusReason) {
		w.WriteHeader(code)
		w.Write(status(code, reason))
	}
	s.mu.Lock()
	fail := s.fail > 0
	s.fail = max(0, s.fail-1)
	code := pick(s.rng, http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable, http.StatusGatewayTimeout)
	s.mu.Unlock()
	switch {
	case fail:
		s.abort(3)
		if code == http.StatusTooManyRequests {
			w.Header().Set("Retry-After", "1")
		}
		refuse(code, metav1.StatusReasonInternalError)
	case r.Method != http.MethodGet:
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind":"Event","apiVersion":"v1","metadata":{"name":"event","namespace":"default"}}`)
	case q.Get("watch") == "":
		items, version := s.shuffled(res)
		w.Write(encode(map[string]any{
			"kind": kinds[res].Kind + "List", "apiVersion": kinds[res].GroupVersion().String(),
			"metadata": metav1.ListMeta{ResourceVersion: fmt.Sprint(version)}, "items": items,
		}))
	case initial && !s.stream:
		refuse(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	default:
		from, _ := strconv.Atoi(q.Get("resourceVersion"))
		s.watch(w, r, res, initial, from)
	}
}

func status(code int, reason metav1.StatusReason) json.RawMessage {
	return encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reason,
	})
}

// shuffled returns the objects of a resource as JSON in random order, and their version.
func (s *apiServer) shuffled(r resource) (list []json.RawMessage, version int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list = []json.RawMessage{}
	for _, o := range s.objects[r] {
		list = append(list, encode(o))
	}
	return list, len(s.log)
}

// abort ends a response in the middle with probability 1/n.
func (s *apiServer) abort(n int) {
	s.mu.Lock()
	abort := s.rng.IntN(n) == 0
	s.mu.Unlock()
	if abort {
		panic(http.ErrAbortHandler)
	}
}

// watch sends the changes after a resource version, or after the initial events of all objects.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, res resource, initial bool, from int) {
	send := func(kind watch.EventType, o json.RawMessage) {
		w.Write(append(encode(change{Type: kind, Object: o}), '\n'))
		w.(http.Flusher).Flush()
	}
	s.mu.Lock()
	generation, expired := s.generation, from < s.floor
	s.mu.Unlock()
	switch {
	case initial:
		var items []json.RawMessage
		items, from = s.shuffled(res)
		for i, o := range items {
			if i == len(items)/2 {
				s.abort(6)
			}
			send(watch.Added, o)
		}
		// The bookmark at the end of the initial events.
		m := metav1.ObjectMeta{ResourceVersion: fmt.Sprint(from), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
		send(watch.Bookmark, encode(map[string]any{"kind": kinds[res].Kind, "apiVersion": kinds[res].GroupVersion().String(), "metadata": m}))
	case expired:
		send(watch.Error, status(http.StatusGone, metav1.StatusReasonExpired))
		return
	}
	w.(http.Flusher).Flush()
	for ended := false; !ended; {
		s.mu.Lock()
		ended = s.generation != generation
		if from < s.floor { // what was not sent has expired, and nothing may follow it
			from = len(s.log)
		}
		list, changed := slices.Clone(s.log[from:]), s.changed
		from = len(s.log)
		s.mu.Unlock()
		for _, c := range list {
			if c.of == res {
				send(c.Type, c.Object)
			}
		}
		if !ended {
			select {
			case <-changed:
			case <-r.Context().Done():
				return
			}
		}
	}
	s.abort(2)
}
