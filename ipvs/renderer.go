package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/ruleset"
)

// Renderer turns rulesets into the objects of a node, for all of its families, on every system and without
// privileges. It plans with the code of a [Backend], and writes text instead of messages to the kernel. It does no
// I/O: the caller's deltas determine what is in effect. It is not safe for concurrent use. [NewRenderer] makes one;
// the zero value must not be used.
type Renderer struct {
	// Addresses holds addresses of the node's devices that its Node object lacks. A change has an effect at the
	// next call of Render.
	Addresses []netip.Addr

	backend *Backend
	kernel  *recorder
}

// NewRenderer returns a Renderer of the objects that a [Backend] writes. It uses c.Families, c.Scheduler,
// c.Properties, c.Schedulers, c.Timeouts and c.MasqueradeMark, and assumes that the kernel has all schedulers. The
// error wraps [ruleset.ErrConfig].
func NewRenderer(c Config) (*Renderer, error) {
	c.Log, c.KeepSysctls = nil, true
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	k := &recorder{config: c}
	k.backend = newBackend(c, k)
	k.backend.now = func() time.Time { return time.Time{} } // what a delta leads to must not depend on the time
	return &Renderer{backend: k.backend, kernel: k}, nil
}

// Render returns the transaction from the objects before d to those after it. That of a full delta is for a network
// namespace that has none of them. NodePorts answer at those addresses of d.Node.Info and r.Addresses that d.Node
// allows. The Renderer counts the transaction as applied; otherwise the caller must call [Transaction.Revert] before
// the next Render.
//
// Render returns [ruleset.ErrNeedFull] if d is not full although it must be, and no transaction.
func (r *Renderer) Render(d *ruleset.Delta) (*Transaction, error) {
	if d.Full {
		r.forget()
	}
	r.kernel.node, r.kernel.own = d.Node, slices.Concat(d.Node.Info.Addresses, r.Addresses)
	err := r.backend.Apply(context.Background(), d)
	t := r.take()
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Retire returns the transaction that deletes what drains: the real servers that earlier transactions gave the weight
// 0, and the objects of deleted Services that their connections need. The caller chooses the time. The error wraps
// [ruleset.ErrNeedFull] if the next delta must be full.
func (r *Renderer) Retire() (*Transaction, error) {
	r.kernel.idle = true
	err := r.backend.tend(context.Background(), time.Time{}.AddDate(1000, 0, 0))
	r.kernel.idle = false
	return r.take(), err
}

func (r *Renderer) take() *Transaction {
	t := &Transaction{revert: r.forget}
	for _, in := range r.kernel.inputs {
		t.inputs = append(t.inputs, Input{in.program, in.text.String()})
	}
	r.kernel.inputs = nil
	return t
}

func (r *Renderer) forget() {
	r.backend.states, r.backend.before, r.kernel.bound = nil, nil, map[netip.Addr]bool{}
	clear(r.backend.rules)
}

// Transaction is a change of a node's objects, as a value. Its methods other than Revert may be called
// concurrently. The zero value must not be used.
type Transaction struct {
	inputs []Input
	revert func()
}

// Input is the input of one call of a program.
type Input struct {
	// Program is the program with its arguments: "ipvsadm -R", "ipset restore", "ip -batch -",
	// "iptables-restore --noflush", "ip6tables-restore --noflush" or "nft -f -".
	Program string
	// Text is the input. Programs of tables apply it as a whole or not at all, and the others line by line.
	Text string
}

// Empty reports whether the transaction changes nothing.
func (t *Transaction) Empty() bool { return len(t.inputs) == 0 }

// Inputs returns the inputs that apply the transaction, in the order of a [Backend]. They write what a Backend
// writes, with these exceptions:
//
//   - Kernel parameters are not set: see [SetSysctls].
//   - ipvsadm cannot write the timeout that identifies the virtual servers of internal traffic. A Backend that
//     follows recognizes them by the set elements that lead to them.
//   - ipvsadm gives real servers that packets reach directly the port of the virtual server. So a change of
//     [Properties].Forwarding replaces real servers, and ends their connections.
//   - A kernel without nf_tables refuses the input of nft, and a Backend does without.
func (t *Transaction) Inputs() []Input { return t.inputs[:len(t.inputs):len(t.inputs)] }

// String returns the inputs as a shell script, each as a here-document of its program.
func (t *Transaction) String() string {
	var b strings.Builder
	for _, in := range t.inputs {
		fmt.Fprintf(&b, "%s <<'END'\n%sEND\n", in.Program, in.Text)
	}
	return b.String()
}

// Revert makes the Renderer forget its last transaction, which was not applied, and all that it rendered: the next
// delta must be full.
func (t *Transaction) Revert() { t.revert() }
