//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// testUDPAnswersArriveWhileDraining sends the answer of an endpoint after it was removed. While
// its real server drains, the client must get the answer. Afterwards, the next request from the
// same port must go to another endpoint.
func testUDPAnswersArriveWhileDraining(t *testing.T) {
	h := newHost(t)
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}})
	type request struct {
		server int
		from   net.Addr
		text   string
	}
	requests := make(chan request, 1000)
	var servers [3]net.PacketConn
	// The endpoints are the node's own addresses.
	for i := 1; i <= 2; i++ {
		a := fmt.Sprint("10.244.1.", i)
		must.Do(t, h.AddAddr("eth0", netip.MustParsePrefix(a+"/32")))
		c := must.Get(h.ListenPacket("udp", a+":8080"))(t)
		t.Cleanup(func() { c.Close() })
		servers[i] = c
		go func() {
			buf := make([]byte, 100)
			for {
				n, from, err := c.ReadFrom(buf)
				if err != nil {
					return
				}
				requests <- request{i, from, string(buf[:n])}
			}
		}()
	}
	r.set(svc(1, over(v1.ProtocolUDP)), 1, 1)
	r.sync()
	client := must.Get(h.Dial(t.Context(), "udp", "192.0.2.1:0", clusterIP(1)+":80"))(t)
	t.Cleanup(func() { client.Close() })
	// ask sends a request until one arrives at a server.
	ask := func(text string, server int) request {
		t.Helper()
		for start := time.Now(); time.Since(start) < testtime.Timeout; {
			// The kernel drops a packet that comes before it has ended the connections of a deleted real
			// server, which is EPERM for a socket of the node.
			if _, err := client.Write([]byte(text)); err != nil && !errors.Is(err, syscall.EPERM) {
				t.Fatal(err)
			}
			select {
			case got := <-requests:
				if got.text == text && got.server == server {
					return got
				}
			case <-time.After(300 * time.Millisecond):
			}
		}
		t.Fatalf("%q has not arrived at server %d", text, server)
		return request{}
	}
	answer := func(q request, text string) {
		t.Helper()
		must.Get(servers[q.server].WriteTo([]byte(text), q.from))(t)
	}
	receive := func(wait time.Duration) (string, error) {
		buf := make([]byte, 100)
		client.SetReadDeadline(time.Now().Add(wait))
		n, err := client.Read(buf)
		return string(buf[:n]), err
	}

	first := ask("first", 1)
	r.set(svc(1, over(v1.ProtocolUDP)), 1, 2)
	r.sync()
	// The endpoint drains until the first call of Retire, however long this takes.
	answer(first, "in time")
	if got, err := receive(testtime.Timeout); got != "in time" {
		t.Errorf("answer of a draining endpoint: %q, %v", got, err)
	}
	if second := ask("second", 1); second.from.String() != first.from.String() {
		t.Errorf("the client's address is %v, was %v", second.from, first.from)
	}
	must.Do(t, r.backend.tend(context.Background(), time.Now().Add(2*answerTime)))
	r.hasNot("ipvsadm -Sn", "10.244.1.1:8080")
	third := ask("third", 2)
	// A later answer of the first endpoint has the endpoint's own address as its source.
	answer(first, "too late")
	if got, err := receive(time.Second / 2); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("answer of a removed endpoint: %q, %v", got, err)
	}
	answer(third, "in time again")
	if got, err := receive(testtime.Timeout); got != "in time again" {
		t.Errorf("answer of the remaining endpoint: %q, %v", got, err)
	}
}

// testChangedUDPEndpointsLoseNoRequest adds and removes endpoints while clients send requests.
// None may be lost. Before it ends the drain of an endpoint, it waits for the answers to all
// requests that may have been sent to the endpoint, because a busy machine may take long.
func testChangedUDPEndpointsLoseNoRequest(f *faultWorld) {
	t := f.t
	const clients, rounds = 4, 6
	to := []conformance.Target{f.targets[2], {Addr: netip.MustParseAddrPort("192.0.2.1:30051"), Protocol: v1.ProtocolUDP}}
	set := func(n int) {
		f.Tracker.SetService(svc(51, over(v1.ProtocolUDP), nodePort(30051)))
		f.Tracker.SetSlice(podSlice(51, v1.ProtocolUDP, f.pods, n, f.rng))
		f.Sync()
	}
	set(len(f.pods))
	var (
		wg       sync.WaitGroup
		answered [clients]atomic.Int64
		stop     = make(chan struct{})
		mu       sync.Mutex
		servers  = map[string]int{}
		failures []error
	)
	for i := range answered {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				server, err := f.Reach(to[i%len(to)], testtime.Timeout)
				mu.Lock()
				if err != nil {
					failures = append(failures, err)
				} else {
					servers[server.String()]++
				}
				mu.Unlock()
				answered[i].Add(1)
			}
		})
	}
	// waitForClients waits until each client has sent a new request and got the answer or a
	// timeout.
	waitForClients := func() {
		t.Helper()
		for i := range answered {
			// One more request may be on its way.
			until := answered[i].Load() + 2
			for start := time.Now(); answered[i].Load() < until; time.Sleep(time.Millisecond) {
				if time.Since(start) > 2*testtime.Timeout {
					t.Errorf("client %d has sent no request", i)
					return
				}
			}
		}
	}
	waitForClients()
	for range rounds {
		n := 1 + f.rng.IntN(len(f.pods)-1)
		set(n)
		waitForClients()
		// Removed endpoints must get no new requests.
		mu.Lock()
		clear(servers)
		mu.Unlock()
		waitForClients()
		var serving []string
		for _, ep := range f.Engine.Snapshot().Ports {
			if ep.Key.Name == svcName(51).Name {
				for _, e := range ep.Pool(ep.Frontends[0].Target) {
					serving = append(serving, e.Addr.String())
				}
			}
		}
		mu.Lock()
		for s, n := range servers {
			if !slices.Contains(serving, s) {
				t.Errorf("%d requests went to %s, which is not in %v", n, s, serving)
			}
		}
		mu.Unlock()
		if err := f.backend.tend(context.Background(), time.Now().Add(2*answerTime)); err != nil {
			t.Error(err)
		}
		waitForClients()
	}
	close(stop)
	wg.Wait()
	total := int64(0)
	for i := range answered {
		total += answered[i].Load()
	}
	t.Logf("%d requests while endpoints changed %d times, %d lost", total, rounds, len(failures))
	for _, err := range failures[:min(len(failures), 5)] {
		t.Error(err)
	}
	if got := f.backend.draining(); got != 0 {
		t.Errorf("%d endpoints drain, want 0", got)
	}
	setPods(f.Tracker, f.pods, len(f.pods), f.rng)
	f.Sync()
}
