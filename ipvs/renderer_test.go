package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// vendor is a vendor's backend: a Renderer, and a committer of its text.
type vendor struct {
	renderer *Renderer
	// commit applies a transaction. That of a full delta is for a namespace without the objects.
	commit func(t *Transaction, full bool) error
	// applying is set during Apply.
	applying bool
}

// replay returns a function that makes the writes of a Renderer's last transaction in a namespace, as the programs would
// that read its text. testRendererWrites proves the text.
func replay(r *Renderer) func(*memory) error {
	var last []func(kernel) error
	size := func() int {
		if n := len(r.kernel.inputs); n != 0 {
			return n<<32 + r.kernel.inputs[n-1].text.Len()
		}
		last = nil // a new transaction begins
		return 0
	}
	r.backend.kernel = writes{r.kernel, func(write func(kernel) error) error {
		before := size()
		err := write(r.kernel)
		if size() != before {
			last = append(last, write)
		}
		return err
	}}
	return func(m *memory) error {
		k := m.handle()
		if d := m.devices[deviceName]; d != nil {
			k.index = d.index
		}
		m.strict = true
		for _, write := range last {
			if err := write(k); err != nil {
				return err
			}
		}
		return nil
	}
}

func (v *vendor) Limits(tracker.Family) ruleset.Limits { return ruleset.Limits{Affinity: maxAffinity} }

func (v *vendor) Apply(_ context.Context, d *ruleset.Delta) error {
	v.applying = true
	defer func() { v.applying = false }()
	t, err := v.renderer.Render(d)
	if err != nil {
		return err
	}
	if err := v.commit(t, d.Full); err != nil {
		t.Revert()
		return errors.Join(ruleset.ErrNeedFull, err)
	}
	return nil
}

// newVendorPlane returns the data plane of a vendor's backend whose writes fail.
func newVendorPlane(tb testing.TB, env conformance.SimEnv) conformance.Fake {
	m := newMemory(env.NodeAddresses...)
	var v *vendor
	var apply func(*memory) error
	// settle does what a vendor does when connections have ended.
	settle := func() {
		if v == nil || v.applying {
			return
		}
		t := must.Get(v.renderer.Retire())(tb)
		if !t.Empty() {
			must.Do(tb, apply(m))
		}
	}
	commit := func(t *Transaction, full bool) error {
		if t.Empty() {
			return nil
		}
		to := m
		if full {
			to = newMemory(env.NodeAddresses...)
		} else {
			to.look = env.Look // packets meet the new namespace when it is complete
		}
		to.fail = env.Fail
		err := apply(to)
		to.fail, to.look = nil, nil
		if full && err == nil {
			m = to
			env.Look()
		}
		return err
	}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			r := must.Get(NewRenderer(Config{Families: env.Families}))(tb)
			r.Addresses = env.NodeAddresses
			v, apply = &vendor{renderer: r, commit: commit}, replay(r)
			return v
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { settle(); return m.handlePacket(p) },
		Dump:   func() string { settle(); return m.dump() },
	}
}

// TestRendererWritesWhatBackendWrites compares what a Renderer's writes lead to with what a Backend leaves in
// memory. testRendererWrites does so with its text in a machine.
func TestRendererWritesWhatBackendWrites(t *testing.T) {
	t.Parallel()
	backend, text := newMemory(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:1::1")), newMemory()
	rendererWrites(t, memoryNode{backend}, memoryNode{text}, func(r *Renderer) func(*Transaction) error {
		apply := replay(r)
		return func(tx *Transaction) error {
			if tx.Empty() {
				return nil
			}
			return apply(text)
		}
	})
}

// rendererWrites applies a Renderer's transactions, and compares the node text with the node of a Backend that gets the
// same deltas.
func rendererWrites(t *testing.T, backend, text node, applier func(*Renderer) func(*Transaction) error) {
	c := Config{Properties: propertiesOf, Schedulers: []Scheduler{RoundRobin, "lc", Maglev}}
	r := newRigOn(t, backend, c)
	render := must.Get(NewRenderer(c))(t)
	apply := applier(render)
	v := &vendor{renderer: render, commit: func(tx *Transaction, _ bool) error { return apply(tx) }}
	cursor := r.engine.Attach("renderer", v)
	check := func(when string) {
		t.Helper()
		r.sync()
		must.Do(t, cursor.Sync(t.Context()))
		tx, err := render.Retire()
		must.Do(t, errors.Join(err, apply(tx), r.backend.tend(t.Context(), time.Now().Add(time.Hour))))
		r.same(when, objects(t, text), objects(t, backend))
	}
	r.set(svc(1, nodePort(30001), externalIPs("198.18.0.1", "2001:db8:e::1"), externalLocal), 1, 1, -1)
	r.set(svc(2, over(v1.ProtocolSCTP), nodePort(30002)), 2, 1, -1)
	r.set(svc(3, over(v1.ProtocolUDP), nodePort(30003)), 3, 2)
	r.set(svc(4, affinity(300), balancer("198.18.1.1", "203.0.113.0/24", "203.0.114.7/32")), 4, 1, -4)
	r.set(svc(5, hashed), 5, -1, -2)
	r.set(svc(6), 6)
	r.set(svc(7, nodePort(30007), externalLocal), 7, -1)
	r.set(svc(8, with("lc tunnel"), externalIPs("198.18.0.8")), 8, -1, -2)
	r.set(svc(9, with("mh direct"), externalIPs("198.18.0.9")), 9, 1, -2)
	r.set(svc(10, with("rr direct"), externalIPs("198.18.0.10")), 10, 1, -2)
	r.set(svc(11, with("rr gue"), externalIPs("198.18.0.11", "2001:db8:e::11")), 11, 1, -2)
	r.set(svc(12, with("rr gre"), externalIPs("198.18.0.12")), 12, 1, -2)
	check("after a full delta")
	if all := strings.Join(objects(t, text), "\n"); !strings.Contains(all, "--tun-type gue --tun-port 6080") || !strings.Contains(all, "--tun-type gre") {
		t.Errorf("no tunnels of both types in\n%s", all)
	}
	r.set(svc(1, nodePort(30011), externalIPs("198.18.0.1")), 1, 2, -1)
	r.set(svc(2, over(v1.ProtocolSCTP), nodePort(30002)), 2, -1, -3)
	r.set(svc(4, balancer("198.18.1.1", "203.0.115.0/24")), 4, -4)
	r.remove(3)
	r.set(svc(5), 5, -2)
	r.set(svc(6, affinity(10)), 6, 1)
	r.set(svc(7, nodePort(30007)), 7)
	r.set(svc(8, with("mh tunnel"), externalIPs("198.18.0.8")), 8, -2)
	r.set(svc(9), 9, 1, -2)
	r.set(svc(10, externalIPs("198.18.0.10")), 10, 1, -2)
	r.set(svc(11, with("rr gue"), externalIPs("198.18.0.11", "2001:db8:e::11")), 11, -2, 3)
	r.set(svc(12, with("rr tunnel"), externalIPs("198.18.0.12")), 12, 1, -2)
	check("after an incremental delta")
}

// TestTransactionsAreValues renders without a kernel.
func TestTransactionsAreValues(t *testing.T) {
	t.Parallel()
	r, _ := newMemoryRig(t, Config{})
	r.set(svc(1), 1, 1, 2)
	render := must.Get(NewRenderer(Config{}))(t)
	full := r.engine.Snapshot().Delta()
	none := &ruleset.Delta{Node: full.Node, OldNode: full.Node}
	if _, err := render.Render(none); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("an incremental delta first: %v", err)
	}
	tx := must.Get(render.Render(full))(t)
	first := tx.String()
	for _, want := range []string{
		"ip -batch - <<'END'\nlink add kube-ipvs0 type dummy\nEND\n", "\nadd KUBE-CLUSTER-IP 10.96.0.1,tcp:80 -exist\n",
		"\n-A -t 10.96.0.1:80 -s rr\n", "\n-a -t 10.96.0.1:80 -r 10.244.1.2:8080 -m -w 1\n", "\naddr add 10.96.0.1/32 dev kube-ipvs0\n",
		"\nip6tables-restore --noflush <<'END'\n", "\nadd KUBE-LOOP-BACK 10.244.1.1,tcp:8080,10.244.1.1 -exist\n",
	} {
		if !strings.Contains(first, want) {
			t.Errorf("no %q in\n%s", want, first)
		}
	}
	if tx.String() != first || tx.Empty() {
		t.Error("the transaction changed")
	}
	if tx, err := render.Render(none); err != nil || !tx.Empty() || len(tx.Inputs()) != 0 || tx.String() != "" {
		t.Errorf("nothing changed: %v\n%s", err, tx)
	}
	again, err := render.Render(full)
	if err != nil || again.String() != first {
		t.Errorf("a second full delta: %v\n%s", err, again)
	}
	again.Revert()
	if _, err := render.Render(none); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("an incremental delta after Revert: %v", err)
	}
	if _, err := NewRenderer(Config{Scheduler: "no scheduler"}); !errors.Is(err, ruleset.ErrConfig) {
		t.Errorf("a scheduler with a blank: %v", err)
	}
}

// TestEqualDeltasRenderEqually renders the same random changes twice.
func TestEqualDeltasRenderEqually(t *testing.T) {
	t.Parallel()
	r, _ := newMemoryRig(t, Config{})
	var texts [2]string
	var cursors [2]*ruleset.Cursor
	for i := range texts {
		render := must.Get(NewRenderer(Config{}))(t)
		cursors[i] = r.engine.Attach("renderer", &vendor{renderer: render, commit: func(tx *Transaction, _ bool) error {
			retired, err := render.Retire()
			texts[i] = tx.String() + retired.String()
			return err
		}})
	}
	for step := range 30 {
		for i := range 4 {
			var ns []int
			for n := range 8 {
				if (step*7+i*3+n*n)%5 < 2 {
					ns = append(ns, n-4, n+9)
				}
			}
			r.set(svc(i, nodePort(int32(30000+i)), externalLocal, externalIPs(fmt.Sprint("198.18.0.", (step+i)%9), fmt.Sprint("198.18.1.", i))), i, ns...)
		}
		if step%3 == 0 {
			r.remove(step % 4)
		}
		for i, c := range cursors {
			texts[i] = ""
			must.Do(t, c.Sync(t.Context()))
		}
		if texts[0] != texts[1] {
			t.Fatalf("step %d: %s", step, backendtest.FirstDifference(texts[0], texts[1]))
		}
	}
}

// TestRetireDeletesWhatDrains removes an endpoint and a Service.
func TestRetireDeletesWhatDrains(t *testing.T) {
	t.Parallel()
	r, _ := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	render := must.Get(NewRenderer(r.config))(t)
	var last *Transaction
	cursor := r.engine.Attach("renderer", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) (err error) {
		last, err = render.Render(d)
		return err
	}))
	step := func(want string) {
		t.Helper()
		must.Do(t, cursor.Sync(t.Context()))
		if got := last.String(); got != want {
			t.Errorf("rendered\n%s\nwant\n%s", got, want)
		}
		last = nil
	}
	retire := func(want string) {
		t.Helper()
		if tx, err := render.Retire(); err != nil || tx.String() != want {
			t.Errorf("retired, error %v:\n%s\nwant\n%s", err, tx, want)
		}
	}
	retire("")
	r.set(svc(1), 1, -1, -2)
	_ = cursor.Sync(t.Context())
	r.set(svc(1), 1, -2)
	step("ipvsadm -R <<'END'\n-e -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 0\nEND\n")
	retire("ipvsadm -R <<'END'\n-d -t 10.96.0.1:80 -r 10.245.0.1:8080\nEND\n")
	retire("")
	r.remove(1)
	step(`ipvsadm -R <<'END'
-e -t 10.96.0.1:80 -r 10.245.0.2:8080 -m -w 0
END
ipset restore <<'END'
add KUBE-IPVS-EXTERNAL-IPS 10.96.0.1 -exist
add KUBE-NO-LOCAL-ENDPOINTS 10.96.0.1,tcp:80 -exist
END
`)
	retire(`ipvsadm -R <<'END'
-d -t 10.96.0.1:80 -r 10.245.0.2:8080
-D -t 10.96.0.1:80
END
ip -batch - <<'END'
addr del 10.96.0.1/32 dev kube-ipvs0
END
ipset restore <<'END'
del KUBE-CLUSTER-IP 10.96.0.1,tcp:80 -exist
del KUBE-IPVS-IPS 10.96.0.1 -exist
del KUBE-IPVS-EXTERNAL-IPS 10.96.0.1 -exist
del KUBE-NO-LOCAL-ENDPOINTS 10.96.0.1,tcp:80 -exist
END
`)
}

// objects returns what the tools list on a node, without what a text cannot have.
func objects(tb testing.TB, n node) (out []string) {
	for _, c := range []string{"ipvsadm -Sn", "ip -o addr show dev " + deviceName, "ipset save", "iptables-save", "ip6tables-save"} {
		for _, l := range n.lines(tb, c) {
			switch f := strings.Fields(l); {
			case l == "" || l[0] == '#' || l[0] == ':':
				continue
			case f[0] == "create": // versions of ipset print other options
				l = strings.Join(f[:3], " ")
			case f[0] == "-a" && !strings.Contains(l, " -m "): // see Transaction.Inputs
				f[4], _, _ = strings.Cut(f[4], ":")
				l = strings.Join(f, " ")
			case strings.HasPrefix(c, "ip -o"):
				if l = f[3]; netip.MustParsePrefix(l).Addr().IsLinkLocalUnicast() {
					continue
				}
			}
			out = append(out, l)
		}
	}
	slices.Sort(out)
	return out
}
