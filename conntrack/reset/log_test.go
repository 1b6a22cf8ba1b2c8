package reset

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// TestLinesAreBounded has an endpoint that comes and goes for 1,000 seconds.
func TestLinesAreBounded(t *testing.T) {
	var logged bytes.Buffer
	inRangeBed(t, Config{Delay: time.Second, Log: slog.New(slog.NewTextHandler(&logged, nil))}, func(b *rangeBed) {
		groups := 0
		for i := range 1000 {
			b.apply(endpointsOf("web", "10.96.0.1", fmt.Sprintf("10.244.%d.%d:80", i/250, i%250)), endpointsOf("web", "10.96.0.1"))
			time.Sleep(time.Second)
			before := len(b.pairs)
			if _, err := b.r.step(t.Context()); err != nil {
				t.Fatal(err)
			}
			if len(b.pairs) > before {
				groups++
			}
		}
		if groups != 1000 {
			t.Errorf("%d groups of pairs", groups)
		}
	})
	n := strings.Count(logged.String(), "\n")
	if n < lineBurst || n > lineBurst+1000/int(lineEvery/time.Second) || !strings.Contains(logged.String(), "suppressed=9") {
		t.Errorf("%d lines:\n%.2000s", n, &logged)
	}
}
