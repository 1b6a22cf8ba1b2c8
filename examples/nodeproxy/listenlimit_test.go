package main

import (
	"net"
	"testing"
)

func TestListenersAreBounded(t *testing.T) {
	l := &listenLimit{max: 2}
	var open []net.Listener
	for range 2 {
		x, err := l.listen(t.Context(), "tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		open = append(open, x)
	}
	if x, err := l.listen(t.Context(), "tcp4", "127.0.0.1:0"); err == nil {
		x.Close()
		t.Error("a third listener was opened")
	}
	// Closing a listener twice gives back one.
	open[0].Close()
	open[0].Close()
	x, err := l.listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("after one was closed: %v", err)
	}
	defer x.Close()
	// A failure gives back its own.
	for range 3 {
		if _, err := l.listen(t.Context(), "tcp4", "192.0.2.255:1"); err == nil {
			t.Fatal("a foreign address can be listened at")
		}
	}
	open[1].Close()
	if x, err := l.listen(t.Context(), "tcp4", "127.0.0.1:0"); err != nil {
		t.Errorf("after failures: %v", err)
	} else {
		x.Close()
	}
	if l := newListenLimit(); l.max < 1 {
		t.Errorf("the default limit is %d", l.max)
	}
}
