package standin

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
)

// env is the environment variable by which the DLLs find a server.
const env = "HNS_STANDIN"

// Server answers the calls of the DLLs from a service in memory. Its methods are safe for
// concurrent use.
type Server struct {
	listener net.Listener

	mu      sync.Mutex
	service *fakehns.Service
	// documents holds objects that programs created, as they described them: the service in
	// memory knows less.
	documents map[string]map[string]json.RawMessage
	calls     map[string]int
	last      time.Time
	version   [2]int
}

// NewServer returns a server that accepts the connections of l, at an IPv4 address, until Close is
// called. The service reports HNS 15.5.
func NewServer(l net.Listener, s *fakehns.Service) *Server {
	out := &Server{listener: l, calls: map[string]int{}, version: [2]int{15, 5}}
	out.Use(s)
	go out.accept()
	return out
}

// Close stops listening. Calls then fail as if the service did not run.
func (s *Server) Close() error { return s.listener.Close() }

// Env returns the environment variable of programs whose calls the server answers.
func (s *Server) Env() string { return env + "=" + s.listener.Addr().String() }

// Setenv makes the server answer the calls of this process, which runs in Wine.
func (s *Server) Setenv() error { return os.Setenv(env, s.listener.Addr().String()) }

// Use replaces the service.
func (s *Server) Use(service *fakehns.Service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.service, s.documents = service, map[string]map[string]json.RawMessage{}
}

// SetVersion sets the version of HNS. A program reads it once.
func (s *Server) SetVersion(major, minor int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version = [2]int{major, minor}
}

// Calls returns the number of calls of each function since the last call of Calls.
func (s *Server) Calls() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.calls
	s.calls = map[string]int{}
	return out
}

// Last returns the time of the last call, or the zero Time.
func (s *Server) Last() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func (s *Server) accept() {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return
		}
		go s.serve(c)
	}
}

// serve answers the calls of one process: see dll/hns.c.
func (s *Server) serve(c net.Conn) {
	defer c.Close()
	in := bufio.NewReader(c)
	for {
		var function, id string
		var n int
		if _, err := fmt.Fscanf(in, "%s %s %d\n", &function, &id, &n); err != nil {
			return
		}
		body := make([]byte, n)
		if _, err := io.ReadFull(in, body); err != nil {
			return
		}
		hr, made, text := s.answer(function, id, body)
		if _, err := fmt.Fprintf(c, "%08x %-36s %17d\n%s", hr, made, len(text), text); err != nil {
			return
		}
	}
}

// answer performs a call. made is the ID of a new object, or "-".
func (s *Server) answer(function, id string, body []byte) (hr uint32, made, text string) {
	s.mu.Lock()
	s.calls[function]++
	s.last = time.Now()
	service, version := s.service, s.version
	s.mu.Unlock()
	if _, err := service.Current(); err != nil && function == "HNSCall" {
		return code(network, err), "-", "{}"
	}
	if function == "HNSCall" && !strings.Contains(string(body), "globals/version") {
		return 0, "-", `{"Success":true,"Output":[]}` // lists of the first version's objects
	}
	if function == "HNSCall" {
		return 0, "-", fmt.Sprintf(`{"Success":true,"Output":{"Major":%d,"Minor":%d}}`, version[0], version[1])
	}
	verb, kind := parse(function)
	made, out, err := s.perform(service, verb, kind, id, body)
	if err != nil {
		refusal, _ := json.Marshal(map[string]any{"Success": false, "Error": err.Error()})
		return code(kind, err), "-", string(refusal)
	}
	return 0, made, string(out)
}

// The kinds of objects, as functions name them.
const (
	network      = "Network"
	endpoint     = "Endpoint"
	loadBalancer = "LoadBalancer"
)

// parse splits the name of a function into verb and kind.
func parse(function string) (verb, kind string) {
	f := strings.TrimPrefix(function, "Hcn")
	for _, verb := range []string{"Enumerate", "Open", "Query", "Create", "Modify", "Delete"} {
		if rest, ok := strings.CutPrefix(f, verb); ok {
			return verb, strings.TrimSuffix(strings.TrimSuffix(rest, "s"), "Propertie")
		}
	}
	return f, ""
}

// code returns the HRESULT of an error.
func code(kind string, err error) uint32 {
	var c winkernel.Code
	switch {
	case errors.As(err, &c):
		return uint32(c)
	case errors.Is(err, winkernel.ErrNotRunning):
		return 0x800706b5 // RPC_S_UNKNOWN_IF
	case errors.Is(err, winkernel.ErrNotImplemented):
		return 0x80004001 // E_NOTIMPL
	case errors.Is(err, winkernel.ErrExists) && kind == endpoint:
		return 0x803b002f // HCN_E_ADDR_INVALID_OR_RESERVED
	case errors.Is(err, winkernel.ErrExists):
		return 0x803b0013 // HCN_E_PORT_ALREADY_EXISTS
	case errors.Is(err, winkernel.ErrNotFound) && kind == network:
		return 0x803b0001 // HCN_E_NETWORK_NOT_FOUND
	case errors.Is(err, winkernel.ErrNotFound) && kind == endpoint:
		return 0x803b0002 // HCN_E_ENDPOINT_NOT_FOUND
	case errors.Is(err, winkernel.ErrNotFound):
		return 0x80070490 // ERROR_NOT_FOUND
	}
	return 0x80004005 // E_FAIL
}

// perform performs a call. For a new endpoint, id is the network's.
func (s *Server) perform(service *fakehns.Service, verb, kind, id string, body []byte) (made string, out []byte, err error) {
	switch verb {
	case "Enumerate":
		ids, err := enumerate(service, kind, body)
		if err != nil {
			return "-", nil, err
		}
		out, err = json.Marshal(ids)
		return "-", out, err
	case "Open", "Query":
		out, err = s.describe(service, kind, id)
		return "-", out, err
	case "Create", "Modify":
		made, err = write(service, verb, kind, id, body)
		if err != nil {
			return "-", nil, err
		}
		if verb == "Modify" {
			made = id
		}
		return made, nil, s.remember(kind, made, id, body)
	case "Delete":
		if kind == endpoint {
			err = service.DeleteEndpoint(id)
		} else {
			err = service.DeleteLoadBalancer(id)
		}
		if err == nil {
			s.forget(kind, id)
		}
		return "-", nil, err
	}
	return "-", nil, winkernel.ErrNotImplemented
}

func (s *Server) remember(kind, id, networkID string, body []byte) error {
	document := map[string]any{}
	if err := json.Unmarshal(body, &document); err != nil {
		return err
	}
	document["ID"] = id
	if kind == endpoint {
		document["HostComputeNetwork"] = networkID
	}
	text, err := json.Marshal(document)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.documents[kind] == nil {
		s.documents[kind] = map[string]json.RawMessage{}
	}
	s.documents[kind][id] = text
	return nil
}

func (s *Server) forget(kind, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.documents[kind], id)
}

// describe returns the document of an object: what a program wrote, or else what the service in
// memory knows. Load balancers are always described as the service has them, because it changes
// their endpoints.
func (s *Server) describe(service *fakehns.Service, kind, id string) ([]byte, error) {
	known, err := document(service, kind, id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	wrote := s.documents[kind][id]
	s.mu.Unlock()
	if wrote != nil && kind == endpoint {
		return wrote, nil
	}
	return json.Marshal(known)
}
