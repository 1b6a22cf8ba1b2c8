package complaint_test

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/complaint"
)

func Example() {
	noTime := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	complaints := complaint.NewLog(slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: noTime})))

	web := complaint.Port("shop", "web", "shop/web:http")
	weight := strings.Repeat("9", 110)
	for range 3 { // a tenant updates the Service
		complaints.Write(slog.LevelWarn, web, "ignored annotation", "weight", complaint.Value(weight))
	}
	// Output:
	// level=WARN msg="ignored annotation" service=shop/web:http weight="9999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999... (10 more bytes)"
}

func ExampleBucket() {
	lines := complaint.Bucket{Burst: 2, Every: time.Minute}
	now := time.Now()
	for _, after := range []time.Duration{0, time.Second, 2 * time.Second, 3 * time.Second, time.Minute} {
		if suppressed, ok := lines.Take(now.Add(after)); ok {
			fmt.Println("sync failed, suppressed:", suppressed)
		}
	}
	// Output:
	// sync failed, suppressed: 0
	// sync failed, suppressed: 0
	// sync failed, suppressed: 2
}
