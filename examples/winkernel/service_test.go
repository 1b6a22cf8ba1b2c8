package winkernel_test

import (
	"flag"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/standin"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/internal/testing/must"
)

var (
	dlls = flag.Bool("dlls", false, "call the service in memory by way of Open and the stand-in's DLLs: needs Wine")
	// The library reads the version once in a process.
	dllsVersion = flag.String("dlls.version", "15.5", "with -dlls, the version of HNS that the stand-in reports")
	allDLLs     = flag.Bool("dlls.all", false, "with -dlls or in TestUnderWine, run the whole conformance suite and all kills")
)

// server answers the calls of the DLLs in this process.
var server = sync.OnceValues(func() (*standin.Server, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &standin.Server{Listener: l}
	if _, err := fmt.Sscanf(*dllsVersion, "%d.%d", &s.Version.Major, &s.Version.Minor); err != nil {
		return nil, fmt.Errorf("-dlls.version %q: %w", *dllsVersion, err)
	}
	go s.Serve()
	return s, s.Setenv()
})

// api returns what a backend calls: the service itself or, with -dlls, hnslib and the DLLs, which
// call the service that was last passed to api.
func api(tb testing.TB, s *fakehns.Service) winkernel.HNS {
	tb.Helper()
	if !*dlls {
		return s
	}
	srv := must.Get(server())(tb)
	srv.Use(s)
	h := must.Get(winkernel.Open())(tb)
	return h
}

// parallel runs a test in parallel with others, unless they share the DLLs.
func parallel(t *testing.T) {
	if !*dlls {
		t.Parallel()
	}
}
