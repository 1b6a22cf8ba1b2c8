package netlab

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestGreetingNamesBothEnds connects to a server that greets, and sends lines.
func TestGreetingNamesBothEnds(t *testing.T) {
	h := NewHost(t)
	l, err := h.Listen("tcp", "127.0.0.1:8080")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go Serve(l, Greet)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	to := netip.MustParseAddrPort("127.0.0.1:8080")
	c, lost, err := h.DialTCP(ctx, netip.MustParseAddrPort("127.0.0.2:40000"), to)
	if err != nil || lost != 0 {
		t.Fatalf("%d packets lost, error %v", lost, err)
	}
	lines, greeting, err := ReceiveGreeting(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	defer lines.Close()
	if o := OutcomeOf(greeting, nil); o.Kind != Reached || o.Server != to || o.Source != netip.MustParseAddr("127.0.0.2") {
		t.Errorf("greeting %q: %+v", greeting, o)
	}
	deadline, _ := ctx.Deadline()
	if err := errors.Join(lines.Send(deadline), lines.Echo(deadline)); err != nil || lines.received != 2 {
		t.Errorf("%d lines came back, error %v", lines.received, err)
	}
}

// TestOutcomesAreToldApart checks the outcomes of greetings and errors.
func TestOutcomesAreToldApart(t *testing.T) {
	for _, c := range []struct {
		greeting string
		err      error
		kind     OutcomeKind
		text     string
	}{
		{"10.0.0.1:80 10.0.0.2:4000\n", nil, Reached, "reached 10.0.0.1:80 with source 10.0.0.2"},
		{"hello\n", nil, Failed, "failed: unexpected reply"},
		{"10.0.0.1:80 nobody\n", nil, Failed, "failed: unexpected reply"},
		{"", &net.OpError{Op: "dial", Err: unix.ECONNREFUSED}, Refused, "refused"},
		{"", os.ErrDeadlineExceeded, Silent, "no answer"},
		{"", &net.OpError{Op: "dial", Err: context.DeadlineExceeded}, Silent, "no answer"},
		{"", unix.ECONNRESET, Failed, "failed: connection reset"},
	} {
		if o := OutcomeOf(c.greeting, c.err); o.Kind != c.kind || !strings.HasPrefix(o.String(), c.text) {
			t.Errorf("%q, error %v: %v", c.greeting, c.err, o)
		}
	}
	if got := string(Greeting(netip.MustParseAddrPort("[::ffff:10.0.0.1]:80"), netip.MustParseAddrPort("[fd00::1]:4000"))); got != "10.0.0.1:80 [fd00::1]:4000\n" {
		t.Errorf("greeting %q", got)
	}
}
