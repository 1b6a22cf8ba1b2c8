package inspect

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) {
	netlab.Parallel(6) // worlds wait for packets that must not arrive
	conformance.Main(m)
}

// TestExplainPredictsEveryPacket runs the worlds of package conformance with the data planes of the
// agent, and compares what explain prints with what happens to each packet.
func TestExplainPredictsEveryPacket(t *testing.T) {
	netlab.Require(t)
	families := []tracker.Family{tracker.IPv4, tracker.IPv6}
	if !testtime.Complete() {
		families = families[:1]
	}
	for _, m := range []modes.Mode{modes.NFTables(), modes.IPTables()} {
		t.Run(m.Name, func(t *testing.T) {
			skip := map[conformance.Feature]string{conformance.LoopbackNodePorts: "the agent's process serves them"}
			args := []string{"run", "--manifests", "x", "--hostname-override", "node", "--proxy-mode", m.Name}
			if m.Name == config.ModeIPTables {
				testtime.NeedThorough(t)
				args = append(args, "--iptables-localhost-nodeports=false")
				skip[conformance.ConsistentHash] = "iptables has no match that hashes"
			}
			cfg := configtest.Parsed(t, args)
			e := &explainer{mode: m, texts: map[explained]string{}}
			t.Cleanup(func() {
				if t.Logf("%d different packets", len(e.texts)); len(e.texts) < 100*len(families) {
					t.Error("too few packets were compared")
				}
			})
			conformance.Run(t, conformance.Options{
				Families: families,
				Skip:     skip,
				New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
					p := must.Get(m.Open(tb.Context(), modes.Settings{Config: cfg, Families: env.Families, NetNS: env.NetNS, Rules: func(tracker.Family, string, int, int) {}}))(tb)
					tb.Cleanup(func() { p.Close() })
					return p
				},
				Observe: func(w *conformance.World, p ruleset.Packet, o conformance.Outcome) {
					text := e.explain(t, &objects.World{Config: cfg, Tracker: w.Tracker, Engine: w.Engine}, w.Env, p)
					if why := contradicts(text, p, o); why != "" {
						t.Errorf("%s from %v by %q to %v: %s; explain prints:\n%s", p.Protocol, p.From, p.InInterface, p.To, why, text)
					}
				},
			})
		})
	}
}

// explained is a packet in one state of a world.
type explained struct {
	tracker *tracker.Tracker
	gen     uint64
	packet  string
}

// explainer runs explain once for each packet.
type explainer struct {
	mode modes.Mode

	mu    sync.Mutex
	texts map[explained]string
}

func (e *explainer) explain(t *testing.T, w *objects.World, env conformance.Env, p ruleset.Packet) string {
	key := explained{w.Tracker, w.Engine.Snapshot().Gen, fmt.Sprint(p.From, p.InInterface, p.Protocol, p.To)}
	e.mu.Lock()
	text, ok := e.texts[key]
	e.mu.Unlock()
	if ok {
		return text
	}
	var out strings.Builder
	err := env.Do(func() error {
		o := explainOptions{from: p.From.String(), in: p.InInterface, kernel: true}
		q, err := o.ask(&out, w, ruleset.Packet{To: p.To, Protocol: p.Protocol})
		if err != nil {
			return err
		}
		found, err := e.mode.LookupOne(t.Context(), q.query())
		return q.compare(&out, e.mode, found, err)
	})
	if err != nil {
		fmt.Fprintf(&out, "error: %v\n", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.texts[key] = out.String()
	return out.String()
}

// contradicts returns how explain's text contradicts what happened to a packet, or "".
func contradicts(text string, p ruleset.Packet, o conformance.Outcome) string {
	action, _, _ := strings.Cut(text, ":")
	passes := action == ruleset.ActionPass.String()
	switch {
	case !strings.HasSuffix(text, "kernel: agrees\n"):
		return "the kernel must agree"
	case o.Action != ruleset.ActionForward && !passes && action != o.Action.String():
		return "it happened: " + o.Action.String()
	case o.Action != ruleset.ActionForward:
		return ""
	case passes && o.Endpoints[0].Addr != p.To, !passes && action != o.Action.String():
		return fmt.Sprintf("%v answered", o.Endpoints[0].Addr)
	case passes:
		return ""
	}
	server := o.Endpoints[0]
	_, line, found := strings.Cut(text, fmt.Sprintf("\nendpoint: %v on node ", server.Addr))
	if !found {
		return fmt.Sprintf("%v answered", server.Addr)
	}
	line, _, _ = strings.Cut(line, "\n")
	// The node's own address is among those to which packets are masqueraded.
	if !slices.Contains(p.NodeAddresses, p.From) && !strings.Contains(line, sourceKept(server.Masquerade)) {
		return fmt.Sprintf("%v answered: %s", server.Addr, sourceKept(server.Masquerade))
	}
	if _, hashed, ok := strings.Cut(text, fmt.Sprintf("\nhash: %v goes to ", p.From)); ok {
		if to, _, _ := strings.Cut(hashed, "\n"); to != server.Addr.String() && !strings.Contains(to, "affinity") {
			return fmt.Sprintf("%v answered", server.Addr)
		}
	}
	if !strings.Contains(text, "\nservice: ") {
		return "it names no Service"
	}
	return ""
}
