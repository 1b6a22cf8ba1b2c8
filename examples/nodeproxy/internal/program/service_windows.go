package program

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/windows/svc"
	"golang.org/x/sys/windows/svc/eventlog"
)

// serviceName is the name of the source in the event log. The service may have any name.
const serviceName = "nodeproxy"

// runAsService runs the program as a Windows service if the service manager started it, or if the
// command line has --windows-service. It reports whether it did.
func runAsService(args []string) (code int, ran bool) {
	service, err := svc.IsWindowsService()
	if err == nil && !service && !slices.ContainsFunc(args, asksForService) {
		return 0, false
	}
	s := &windowsService{args: args}
	if err == nil {
		err = svc.Run(serviceName, s)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "nodeproxy: cannot run as a Windows service: %v\n", err)
		return 1, true
	}
	return s.code, true
}

func asksForService(arg string) bool {
	name, value, _ := strings.Cut(arg, "=")
	return name == "--windows-service" && (value == "" || value == "true")
}

// windowsService is the program as the service manager sees it.
type windowsService struct {
	args []string
	code int
}

// Execute implements [svc.Handler]. A stop ends the agent as an interrupt does.
func (s *windowsService) Execute(_ []string, requests <-chan svc.ChangeRequest, status chan<- svc.Status) (specific bool, code uint32) {
	status <- svc.Status{State: svc.StartPending}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	p := newProgram(s.args[0])
	log, err := eventlog.Open(serviceName)
	if err == nil {
		defer log.Close()
		p.Out, p.Diag = io.Discard, events{log} // a line for each sync would fill the event log
	}
	done := make(chan int, 1)
	go func() { done <- Dispatch(ctx, p, s.args[1:]) }()
	status <- svc.Status{State: svc.Running, Accepts: svc.AcceptStop | svc.AcceptShutdown}
	for {
		select {
		case s.code = <-done:
			status <- svc.Status{State: svc.StopPending}
			return s.code != 0, uint32(s.code)
		case r := <-requests:
			switch r.Cmd {
			case svc.Interrogate:
				status <- r.CurrentStatus
			case svc.Stop, svc.Shutdown:
				status <- svc.Status{State: svc.StopPending}
				stop()
			}
		}
	}
}

// events writes each line of the log as an event of the line's severity.
type events struct {
	log interface {
		Info(id uint32, text string) error
		Warning(id uint32, text string) error
		Error(id uint32, text string) error
	}
}

// eventID is the number of all events: the messages are texts.
const eventID = 1

// Write implements [io.Writer].
func (e events) Write(line []byte) (int, error) {
	text := strings.TrimRight(string(line), "\r\n")
	write := e.log.Info
	switch {
	case strings.HasPrefix(text, "W"):
		write = e.log.Warning
	case strings.HasPrefix(text, "E"), strings.HasPrefix(text, "F"), strings.HasPrefix(text, "nodeproxy "), strings.Contains(text, `"level":"error"`):
		write = e.log.Error
	}
	if err := write(eventID, text); err != nil {
		return 0, err
	}
	return len(line), nil
}
