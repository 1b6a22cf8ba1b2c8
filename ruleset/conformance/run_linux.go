package conformance

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Run tests a backend in every world of the suite, each a parallel sub-test. The first sub-test fails within a second
// if the backend forwards nothing; Run then skips all others.
//
// TCP connections with a packet that gets no answer fail, and so do UDP requests without a reply, unless the machine
// stalled. Each world logs the number of excused ones, and Run fails if they exceed 1 % of all connections (and 16,
// the cost of a single stall).
func Run(t *testing.T, o Options) {
	t.Helper()
	if _, err := o.validate(); err != nil {
		t.Fatal(err)
	}
	worlds, err := suite(o.Scripts, true)
	if err != nil {
		t.Fatal(err)
	}
	o.run = new(excuses)
	t.Cleanup(func() { o.run.report(t) })
	if !forwards(t, o) {
		return
	}
	eachWorld(t, worlds, o.Skip, func(t *testing.T, world world) {
		if world.config.sctp {
			netlab.Need(t, sctpTracked(), "a kernel that tracks SCTP connections (CONFIG_NF_CT_PROTO_SCTP)")
		}
		t.Parallel()
		world.run(newWorld(t, o, world.config))
	})
}

// shortly is the time for the backend to forward one of two connections.
const shortly = 500 * time.Millisecond

// forwards is the first sub-test. It fails if, shortly after the backend reported
// success, the node refuses connections to a NodePort and a connection to the cluster
// IP gets no reply.
func forwards(t *testing.T, o Options) bool {
	return t.Run("something is forwarded", func(t *testing.T) {
		w := newWorld(t, o, config{})
		world{steps: linesOf("set web cluster=1 type=NodePort ports=80:30080 endpoints=pod1; sync")}.run(w)
		client, f := w.lab().net.hosts["client1"], w.Env.Families[0]
		var results []string
		for _, a := range []aim{{proto: tcp, address: nodeName, port: 30080}, {proto: tcp, address: "cluster1", port: 80}} {
			o := client.probe(t.Context(), tcp, a.at(f), shortly)
			if o.Kind == netlab.Reached || a.address == nodeName && o.Kind != netlab.Refused {
				return
			}
			results = append(results, fmt.Sprintf("TCP from %s to %s (%s): %s, must be forwarded", client.name, a, a.at(f), o))
		}
		t.Errorf("the backend forwards nothing; all other worlds are skipped:\n%s", strings.Join(results, "\n"))
	})
}

// excuses counts the TCP connections of a world and the UDP requests of its Churn, and those excused because of a
// stall. It is safe for concurrent use.
type excuses struct{ connections, excused atomic.Int64 }

const (
	// maxExcusedPercent is the maximum percentage of excused connections of a run. With more, the machine is too busy
	// to detect a data plane that loses packets.
	maxExcusedPercent = 1
	// freeExcuses is the number of connections that may be excused in any case: as many as one stall can hit.
	freeExcuses = concurrentChecks
)

func (e *excuses) add(other *excuses) {
	e.connections.Add(other.connections.Load())
	e.excused.Add(other.excused.Load())
}

func (e *excuses) String() string {
	return fmt.Sprintf("%d of %d connections had a packet lost in a stall of the machine and were excused",
		e.excused.Load(), e.connections.Load())
}

func (e *excuses) check() error {
	limit := max(freeExcuses, e.connections.Load()*maxExcusedPercent/100)
	if e.excused.Load() > limit {
		return fmt.Errorf("%s, more than %d (%d %%, at least %d): the data plane loses packets, or the machine is too busy",
			e, limit, maxExcusedPercent, freeExcuses)
	}
	return nil
}

// report logs the counts and fails the test if too many connections were excused.
func (e *excuses) report(tb testing.TB) {
	tb.Helper()
	if err := e.check(); err != nil {
		tb.Error(err)
	} else if e.connections.Load() != 0 {
		tb.Log(e)
	}
}
