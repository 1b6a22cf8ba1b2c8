package core

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
)

// closedListener is a listener that ends immediately.
type closedListener struct{ net.Listener }

var errEnded = errors.New("ended")

func (closedListener) Accept() (net.Conn, error) { return nil, errEnded }
func (closedListener) Close() error              { return nil }

// TestServerLogsAFailureOnce has a server fail many times, as beside a kube-proxy that has its port.
func TestServerLogsAFailureOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var log bytes.Buffer
		attempts, events := 0, 0
		s := &server{
			name: healthzServer, addr: "0.0.0.0:10256", handler: http.NotFoundHandler(), connections: 1,
			listen: func(context.Context, string, string) (net.Listener, error) {
				switch attempts++; {
				case attempts == 20:
					cancel()
				case attempts == 10:
					return closedListener{}, nil
				case attempts%10 > 5:
					return nil, errors.New("no such address")
				}
				return nil, errors.New("address already in use")
			},
			failed: func(error) { events++ },
			log:    slog.New(slog.NewTextHandler(&log, nil)),
		}
		if err := s.run(ctx); err != nil || attempts != 20 {
			t.Fatalf("%v after %d attempts", err, attempts)
		}
		for text, want := range map[string]int{"address already in use": 2, "no such address": 2, "ended": 1, "the server listens": 1, "\n": 6} {
			if n := strings.Count(log.String(), text); n != want {
				t.Errorf("%d times %q, want %d", n, text, want)
			}
		}
		if events != 5 || t.Failed() {
			t.Errorf("%d events, log:\n%s", events, &log)
		}
	})
}
