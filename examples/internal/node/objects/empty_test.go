package objects

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/kubeapi"
)

// TestEmptySourcesAreReported lists no Node, which appears after an hour, and everything else.
func TestEmptySourcesAreReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		reason := ""
		w := &World{
			Config: configtest.Parsed(t, []string{"run", "--hostname-override", "n1"}), Log: slog.New(slog.NewTextHandler(&log, nil)),
			WorldHooks: WorldHooks{Ineligible: func(r string) { reason = r }},
		}
		e := newEmptySources(w)
		ctx, cancel := context.WithCancel(t.Context())
		go e.warn(ctx)
		time.Sleep(time.Minute) // nothing is listed
		for _, s := range []kubeapi.Source{kubeapi.Services, kubeapi.Slices} {
			e.seen(s)
			e.listed(s)
		}
		e.listed(kubeapi.ServiceCIDRs) // clusters before 1.33 have none
		e.listed(kubeapi.Nodes)
		const want = `there is no Node named "n1", a name from --hostname-override`
		if !strings.HasPrefix(reason, want) {
			t.Errorf("not eligible because of %q", reason)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if n, lines := strings.Count(log.String(), strings.ReplaceAll(want, `"`, `\"`)), strings.Count(log.String(), "\n"); n < 5 || n > 15 || lines != n {
			t.Errorf("%d lines, %d of them about the Node, in an hour:\n%s", lines, n, &log)
		}
		e.seen(kubeapi.Nodes)
		log.Reset()
		time.Sleep(time.Hour)
		synctest.Wait()
		if log.Len() != 0 {
			t.Errorf("after the Node appeared:\n%s", &log)
		}
		cancel()
	})
}
