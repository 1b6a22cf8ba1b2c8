//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ServeHTTP answers lists, watches, requests for one object, and writes of Events.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if s.failed(w) {
		return
	}
	if r.Method != http.MethodGet {
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind":"Event","apiVersion":"v1","metadata":{"name":"event","namespace":"default"}}`)
		return
	}
	res, q := resource(path.Base(r.URL.Path)), r.URL.Query()
	if _, ok := kinds[res]; !ok {
		s.get(w, r.URL.Path)
		return
	}
	watching, _ := strconv.ParseBool(q.Get("watch"))
	if !watching {
		s.list(w, res)
		return
	}
	initial := q.Get("sendInitialEvents") == "true"
	if initial && !s.stream {
		writeStatus(w, http.StatusUnprocessableEntity, "Invalid")
		return
	}
	s.watch(w, r, res, initial, q.Get("resourceVersion"))
}

// writeStatus writes an API error.
func writeStatus(w http.ResponseWriter, code int, reason string) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q}`, code, reason)
}

// get answers a request for a cluster-wide object.
func (s *apiServer) get(w http.ResponseWriter, url string) {
	s.mu.Lock()
	o := s.objects[resource(path.Base(path.Dir(url)))]["/"+path.Base(url)]
	s.mu.Unlock()
	if o == nil {
		writeStatus(w, http.StatusNotFound, "NotFound")
		return
	}
	w.Write(encode(o))
}

func (s *apiServer) list(w http.ResponseWriter, r resource) {
	items, version := s.shuffled(r)
	if items == nil {
		items = []json.RawMessage{}
	}
	w.Write(encode(map[string]any{
		"kind": kinds[r].Kind + "List", "apiVersion": kinds[r].APIVersion,
		"metadata": metav1.ListMeta{ResourceVersion: fmt.Sprint(version)}, "items": items,
	}))
}

// stream writes the events of one watch.
type stream struct {
	w   http.ResponseWriter
	res resource
}

func (t stream) send(kind string, o json.RawMessage) {
	fmt.Fprintf(t.w, "{\"type\":%q,\"object\":%s}\n", kind, o)
	t.w.(http.Flusher).Flush()
}

// end sends the bookmark at the end of the initial events.
func (t stream) end(version int64) {
	m := metav1.ObjectMeta{ResourceVersion: fmt.Sprint(version), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
	t.send("BOOKMARK", encode(map[string]any{"kind": kinds[t.res].Kind, "apiVersion": kinds[t.res].APIVersion, "metadata": m}))
}

// watch sends events after a resource version, or after the initial events of all objects.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, res resource, initial bool, version string) {
	t := stream{w, res}
	s.mu.Lock()
	generation := s.generation
	s.mu.Unlock()
	from, _ := strconv.ParseInt(version, 10, 64)
	if initial {
		var items []json.RawMessage
		items, from = s.shuffled(res)
		interrupt := s.chance(6)
		for i, o := range items {
			if interrupt && i == len(items)/2 {
				panic(http.ErrAbortHandler)
			}
			t.send("ADDED", o)
		}
		t.end(from)
	} else if s.expired(from) {
		t.send("ERROR", encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: "too old resource version"}))
		return
	}
	w.(http.Flusher).Flush()
	defer context.AfterFunc(r.Context(), s.wake)()
	for {
		list, more := s.next(res, from, generation, func() bool { return r.Context().Err() != nil })
		if !more {
			if s.chance(2) {
				panic(http.ErrAbortHandler)
			}
			return
		}
		for _, e := range list {
			t.send(e.kind, e.object)
			from = e.version
		}
	}
}

// expired reports whether a watch cannot start after a version.
func (s *apiServer) expired(version int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return version < s.floor
}

// kubeconfig is the agent's configuration for the API server.
var kubeconfig = strings.ReplaceAll(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://ADDRESS"}}]
users: [{name: u, user: {}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, "ADDRESS", apiAddress)
