package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
)

const service = `{"service": {"metadata": {"namespace": "shop", "name": "web"},
	"spec": {"clusterIP": "10.96.0.10", "ports": [{"name": "http", "port": 80}]}}}
`

func slice(addrs string) string {
	return fmt.Sprintf(`{"slice": {"metadata": {"namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
	"addressType": "IPv4", "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}], "endpoints": [{"addresses": [%s]}]}}
`, strings.ReplaceAll(addrs, " ", `]}, {"addresses": [`))
}

// TestEachChangeIsPrinted writes each object after the changes of the one before were
// printed.
func TestEachChangeIsPrinted(t *testing.T) {
	in, feed := io.Pipe()
	heard, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := run(context.Background(), in, out)
		out.CloseWithError(err)
		ended <- err
	}()
	time.AfterFunc(time.Minute, func() { out.CloseWithError(context.DeadlineExceeded) })
	steps := []struct{ in, out string }{
		{service + slice(`"10.1.0.1" "10.1.0.2"`) + `{"synced": true}`, `
+ shop/web:http/TCP/IPv4
   + 10.1.0.1:8080
   + 10.1.0.2:8080
`},
		{slice(`"10.1.0.2" "10.1.0.3"`), `
~ shop/web:http/TCP/IPv4
   + 10.1.0.3:8080
   - 10.1.0.1:8080
`},
		{`{"gone": {"namespace": "shop", "name": "web"}}`, `
- shop/web:http/TCP/IPv4
   - 10.1.0.2:8080
   - 10.1.0.3:8080
`},
	}
	for _, s := range steps {
		must.Get(io.WriteString(feed, s.in))(t)
		want := strings.TrimPrefix(s.out, "\n")
		got := make([]byte, len(want))
		if _, err := io.ReadFull(heard, got); err != nil || string(got) != want {
			t.Fatalf("printed %q, %v; want %q", got, err, want)
		}
	}
	feed.Close()
	if rest, err := io.ReadAll(heard); err != nil || len(rest) != 0 {
		t.Errorf("unexpected output %q, error %v", rest, err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestEndOfInputCountsAsSynced(t *testing.T) {
	var out strings.Builder
	must.Do(t, run(context.Background(), strings.NewReader(service), &out))
	if want := "+ shop/web:http/TCP/IPv4\n"; out.String() != want {
		t.Errorf("printed %q, want %q", out.String(), want)
	}
	if err := run(context.Background(), strings.NewReader("{"), io.Discard); err == nil {
		t.Error("no error for half an object")
	}
}
