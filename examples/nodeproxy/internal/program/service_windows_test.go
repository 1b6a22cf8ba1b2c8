package program

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/windows/svc"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// service calls the handler as the service manager does, with requests, each sent once the agent
// runs. It returns the states of the service and its exit code.
func service(t *testing.T, args []string, requests ...svc.ChangeRequest) (states []svc.State, specific bool, code uint32) {
	t.Helper()
	in, status := make(chan svc.ChangeRequest), make(chan svc.Status)
	go func() {
		defer close(status)
		s := &windowsService{args: append([]string{"nodeproxy.exe"}, args...)}
		specific, code = s.Execute(nil, in, status)
	}()
	for s := range status {
		states = append(states, s.State)
		if (s.State == svc.Running || s.State == svc.Paused) && len(requests) != 0 {
			in <- requests[0]
			requests = requests[1:]
		}
	}
	return states, specific, code
}

// TestServiceEndsWithTheAgent stops a service, and runs one that ends by itself.
func TestServiceEndsWithTheAgent(t *testing.T) {
	dir := must.Get(os.MkdirTemp("", "service"))(t)
	defer os.RemoveAll(dir) // fails while the agent's watch is open
	waits := []string{"run", "--windows-service", "--network-name=no-such-network", "--manifests=" + dir, "--bind-address=192.0.2.1"}
	asked := svc.Status{State: svc.Paused} // a state that the service never has by itself
	for _, tt := range []struct {
		name     string
		args     []string
		requests []svc.ChangeRequest
		states   []svc.State
		code     uint32
	}{
		{"stop", waits, []svc.ChangeRequest{{Cmd: svc.Interrogate, CurrentStatus: asked}, {Cmd: svc.Stop}},
			[]svc.State{svc.StartPending, svc.Running, svc.Paused, svc.StopPending, svc.StopPending}, 0},
		{"bad flag", []string{"--no-such-flag", "--windows-service"}, nil, []svc.State{svc.StartPending, svc.Running, svc.StopPending}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			states, specific, code := service(t, tt.args, tt.requests...)
			if !slices.Equal(states, tt.states) || code != tt.code || specific != (code != 0) {
				t.Errorf("states %v, exit code %d (specific: %v); want %v, %d", states, code, specific, tt.states, tt.code)
			}
		})
	}
}

// TestServiceWritesToTheEventLog looks for the error of a service without --log-file.
func TestServiceWritesToTheEventLog(t *testing.T) {
	if os.Getenv("PROXIER_HNS") == "" {
		t.Skip("needs Windows, and PROXIER_HNS=1 in the environment: the test writes to the event log")
	}
	service(t, []string{"run", "--windows-service", "--no-such-flag"})
	out, err := exec.Command("wevtutil", "qe", "Application", "/rd:true", "/c:20", "/f:xml", "/q:*[System[Provider[@Name='"+serviceName+"']]]").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "no-such-flag") {
		t.Errorf("the event log lacks the error: %v\n%s", err, out)
	}
}

// records is an event log in memory.
type records struct {
	list []string
	err  error
}

func (r *records) Info(_ uint32, text string) error {
	r.list = append(r.list, "info: "+text)
	return r.err
}

func (r *records) Warning(_ uint32, text string) error {
	r.list = append(r.list, "warning: "+text)
	return r.err
}

func (r *records) Error(_ uint32, text string) error {
	r.list = append(r.list, "error: "+text)
	return r.err
}

// TestEventHasTheSeverityOfItsLine writes lines of the log.
func TestEventHasTheSeverityOfItsLine(t *testing.T) {
	r := &records{}
	var want []string
	for line, event := range map[string]string{
		"I1124 11:00:00.000000       1 agent.go:1] \"starting\"\r\n": "info",
		"W1124 11:00:00.000000       1 agent.go:1] \"waiting\"\n":    "warning",
		"E1124 11:00:00.000000       1 agent.go:1] \"failed\"\n":     "error",
		"F1124 11:00:00.000000       1 agent.go:1] \"failed\"\n":     "error",
		"nodeproxy run: no such flag\n":                              "error",
		`{"ts":1,"level":"info","msg":"x"}` + "\n":                   "info",
		`{"ts":1,"level":"error","msg":"x"}` + "\n":                  "error",
	} {
		r.list, want = nil, []string{event + ": " + strings.TrimRight(line, "\r\n")}
		if n, err := (events{r}).Write([]byte(line)); n != len(line) || err != nil || !slices.Equal(r.list, want) {
			t.Errorf("%q: %q, %v; want %q", line, r.list, err, want)
		}
	}
	r.err = errors.New("full")
	if _, err := (events{r}).Write([]byte("I")); !errors.Is(err, r.err) {
		t.Errorf("a full log: %v", err)
	}
}
