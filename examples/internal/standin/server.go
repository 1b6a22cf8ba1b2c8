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
	"sync/atomic"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
)

// env is the environment variable by which the DLLs find a server.
const env = "HNS_STANDIN"

// Server answers the calls of the DLLs from a service in memory, while Serve runs.
type Server struct {
	// Listener is at an IPv4 address.
	Listener net.Listener
	// Version is that of HNS. A program reads it once.
	Version struct{ Major, Minor int }
	// Called, if not nil, is called for each call, by several goroutines.
	Called func()

	service atomic.Pointer[fakehns.Service]
}

// Serve accepts connections until the Listener is closed. Calls then fail as if the service did not run.
func (s *Server) Serve() {
	for {
		c, err := s.Listener.Accept()
		if err != nil {
			return
		}
		go s.serve(c)
	}
}

// Env returns the environment variable of programs whose calls the server answers.
func (s *Server) Env() string { return env + "=" + s.Listener.Addr().String() }

// Setenv makes the server answer the calls of this process, which runs in Wine.
func (s *Server) Setenv() error { return os.Setenv(env, s.Listener.Addr().String()) }

// Use sets the service. It may be called while Serve runs.
func (s *Server) Use(service *fakehns.Service) { s.service.Store(service) }

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
	if s.Called != nil {
		s.Called()
	}
	service := s.service.Load()
	if function == "HNSCall" {
		_, err := service.Current()
		switch {
		case err != nil:
			return code(err), "-", "{}"
		case strings.Contains(string(body), "globals/version"):
			return 0, "-", fmt.Sprintf(`{"Success":true,"Output":{"Major":%d,"Minor":%d}}`, s.Version.Major, s.Version.Minor)
		}
		return 0, "-", `{"Success":true,"Output":[]}` // lists of the first version's objects
	}
	verb, kind := parse(function)
	made, out, err := perform(service, verb, kind, id, body)
	if err != nil {
		refusal, _ := json.Marshal(map[string]any{"Success": false, "Error": err.Error()})
		return code(err), "-", string(refusal)
	}
	if out != nil {
		document, _ := json.Marshal(out) // all documents can be encoded
		text = string(document)
	}
	return 0, made, text
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
func code(err error) uint32 {
	c := winkernel.Code(0x80004005) // E_FAIL
	errors.As(err, &c)
	return uint32(c)
}

// perform performs a call, and returns the ID of a new object, or "-", and a document. For a new endpoint, id
// is the network's.
func perform(service *fakehns.Service, verb, kind, id string, body []byte) (made string, out any, err error) {
	made = "-"
	switch {
	case verb == "Enumerate":
		out, err = enumerate(service, kind, body)
	case verb == "Open" || verb == "Query":
		out, err = object(service, kind, id)
	case verb == "Create" && kind == endpoint:
		made, err = createEndpoint(service, id, body)
	case (verb == "Create" || verb == "Modify") && kind == loadBalancer:
		made, err = writeLoadBalancer(service, verb, id, body)
	case verb == "Delete" && kind == endpoint:
		err = service.DeleteEndpoint(id)
	case verb == "Delete" && kind == loadBalancer:
		err = service.DeleteLoadBalancer(id)
	default:
		err = winkernel.Code(0x80004001) // E_NOTIMPL
	}
	return made, out, err
}
