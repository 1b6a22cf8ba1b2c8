//go:build linux

package main

import (
	"cmp"
	"context"
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

// apiServer is an API server in memory that can misbehave. One goroutine changes objects; the other methods
// are safe for concurrent use.
type apiServer struct {
	// stream allows lists as watches (sendInitialEvents).
	stream bool
	// lose reports that a change is withheld from all watches. It may be nil.
	lose func() bool
	// announce, if not nil, is called with each object, nil for a deleted one, before a client can see
	// the change.
	announce func(r resource, name string, o object)

	mu   sync.Mutex
	cond *sync.Cond
	rng  *rand.Rand
	// version is the resource version of the latest change.
	version int64
	objects map[resource]map[string]object
	history map[resource][]event
	// Watches that start before floor have expired. Watches of an earlier generation end.
	floor, generation int64
	misbehavior

	server http.Server
}

// misbehavior is how an API server misbehaves.
type misbehavior struct {
	// fail is how many requests are answered with an error.
	fail int
	// retype sends ADDED for some changes of existing objects, and MODIFIED for some new
	// ones. duplicate sends some events twice.
	retype, duplicate bool
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

// kubeconfig is the agent's configuration for the API server.
const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://` + apiAddress + `"}}]
users: [{name: u, user: {}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`

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

// locked calls f with the lock held and wakes all watches.
func (s *apiServer) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.cond.Broadcast()
}

// set creates or replaces an object. It does not modify o.
func (s *apiServer) set(r resource, o object) {
	o = o.DeepCopyObject().(object)
	o.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(kinds[r].APIVersion, kinds[r].Kind))
	if old := s.objects[r][key(o)]; old != nil {
		o.SetUID(old.GetUID())
		o.SetCreationTimestamp(old.GetCreationTimestamp())
		s.change(r, "MODIFIED", o, o)
		return
	}
	o.SetUID(types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", s.version+1)))
	// The times of Services decide conflicts. Some are equal.
	o.SetCreationTimestamp(metav1.Unix(1700000000+(s.version+1)/4, 0))
	s.change(r, "ADDED", o, o)
}

// delete deletes an object if it exists.
func (s *apiServer) delete(r resource, name string) {
	if o := s.objects[r][name]; o != nil {
		s.change(r, "DELETED", o.DeepCopyObject().(object), nil)
	}
}

// change makes a change, after which there is the object now, and sends an event with the object o to watches.
func (s *apiServer) change(r resource, kind string, o, now object) {
	o.SetResourceVersion(fmt.Sprint(s.version + 1))
	if s.announce != nil {
		s.announce(r, key(o), now)
	}
	s.locked(func() {
		s.version++
		if s.objects[r][key(o)] = now; now == nil {
			delete(s.objects[r], key(o))
		}
		if s.lose != nil && s.lose() {
			return
		}
		if now != nil && s.retype && s.rng.IntN(3) == 0 {
			kind = []string{"ADDED", "MODIFIED"}[s.rng.IntN(2)]
		}
		e := event{s.version, kind, encode(o)}
		s.history[r] = append(s.history[r], e)
		if s.duplicate && s.rng.IntN(3) == 0 {
			s.history[r] = append(s.history[r], e)
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
			s.version++
			s.floor = s.version
			clear(s.history)
		}
	})
}

// ServeHTTP answers lists, watches, requests for one object, and writes of Events.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	q, res := r.URL.Query(), resource(path.Base(r.URL.Path))
	watching, _ := strconv.ParseBool(q.Get("watch"))
	initial := q.Get("sendInitialEvents") == "true"
	switch _, known := kinds[res]; {
	case s.failed(w):
	case r.Method != http.MethodGet:
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind":"Event","apiVersion":"v1","metadata":{"name":"event","namespace":"default"}}`)
	case !known: // one object without a namespace
		s.mu.Lock()
		o := s.objects[resource(path.Base(path.Dir(r.URL.Path)))]["/"+string(res)]
		s.mu.Unlock()
		if o == nil {
			writeStatus(w, http.StatusNotFound, "NotFound")
			return
		}
		w.Write(encode(o))
	case !watching:
		items, version := s.shuffled(res)
		w.Write(encode(map[string]any{
			"kind": kinds[res].Kind + "List", "apiVersion": kinds[res].APIVersion,
			"metadata": metav1.ListMeta{ResourceVersion: fmt.Sprint(version)}, "items": items,
		}))
	case initial && !s.stream:
		writeStatus(w, http.StatusUnprocessableEntity, "Invalid")
	default:
		from, _ := strconv.ParseInt(q.Get("resourceVersion"), 10, 64)
		s.watch(r.Context(), w, res, initial, from)
	}
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

// writeStatus writes an API error.
func writeStatus(w http.ResponseWriter, code int, reason string) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q}`, code, reason)
}

// shuffled returns the objects of a resource as JSON in random order, and their version.
func (s *apiServer) shuffled(r resource) (list []json.RawMessage, version int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list = []json.RawMessage{}
	for _, name := range s.names(r) {
		list = append(list, encode(s.objects[r][name]))
	}
	s.rng.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list, s.version
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

// watch sends events after a resource version, or after the initial events of all objects.
func (s *apiServer) watch(ctx context.Context, w http.ResponseWriter, res resource, initial bool, from int64) {
	send := func(kind string, o json.RawMessage) {
		fmt.Fprintf(w, "{\"type\":%q,\"object\":%s}\n", kind, o)
		w.(http.Flusher).Flush()
	}
	s.mu.Lock()
	generation, floor := s.generation, s.floor
	s.mu.Unlock()
	if initial {
		var items []json.RawMessage
		items, from = s.shuffled(res)
		for i, o := range items {
			if i == len(items)/2 {
				s.abort(6)
			}
			send("ADDED", o)
		}
		// The bookmark at the end of the initial events.
		m := metav1.ObjectMeta{ResourceVersion: fmt.Sprint(from), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
		send("BOOKMARK", encode(map[string]any{"kind": kinds[res].Kind, "apiVersion": kinds[res].APIVersion, "metadata": m}))
	} else if from < floor {
		send("ERROR", encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: "too old resource version"}))
		return
	}
	w.(http.Flusher).Flush()
	defer context.AfterFunc(ctx, func() { s.locked(func() {}) })()
	for list := s.next(ctx, res, from, generation); len(list) != 0; list = s.next(ctx, res, from, generation) {
		for _, e := range list {
			send(e.kind, e.object)
			from = e.version
		}
	}
	s.abort(2)
}

// next waits for events of a resource after a version. There are none if the watch has ended: its
// generation is over, its events were dropped, or ctx has ended.
func (s *apiServer) next(ctx context.Context, r resource, after, generation int64) []event {
	s.mu.Lock()
	defer s.mu.Unlock()
	for after >= s.floor {
		h := s.history[r]
		i, _ := slices.BinarySearchFunc(h, after+1, func(e event, v int64) int { return cmp.Compare(e.version, v) })
		if i < len(h) {
			return slices.Clone(h[i:])
		}
		if s.generation != generation || ctx.Err() != nil {
			break
		}
		s.cond.Wait()
	}
	return nil
}
