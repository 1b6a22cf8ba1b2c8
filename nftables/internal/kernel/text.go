package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// Text writes transactions as nft reads them: what a [Writer] writes for the kernel.
type Text struct {
	strings.Builder
	table string
	rules Rules
	// block is set within the definition of a table.
	block bool
}

// NewText returns a Text about the table of a name. rules has its rules and its family.
func NewText(table string, rules Rules) *Text { return &Text{table: table, rules: rules} }

// Add writes a transaction.
func (t *Text) Add(tx *model.Tx) {
	for i := range tx.Objects {
		t.object(&tx.Objects[i])
	}
	t.close()
	for _, deletion := range [...]bool{true, false} {
		var lists [layout.SetCount][]string
		var order []layout.Set
		for i := range tx.Edits {
			e := &tx.Edits[i]
			if e.Deletion != deletion {
				continue
			}
			if lists[e.Set] == nil {
				order = append(order, e.Set)
			}
			lists[e.Set] = append(lists[e.Set], ElementText(e))
		}
		for _, s := range order {
			verb := "create element"
			switch {
			case deletion:
				verb = "delete element"
			case s.Interval():
				verb = "add element" // the kernel refuses the tool's form of create
			}
			t.command(verb, s.Name()+" {\n\t"+strings.Join(lists[s], ",\n\t")+"\n}")
		}
	}
}

// command writes a command about the table, or about an object in it.
func (t *Text) command(verb, object string) {
	t.close()
	fmt.Fprintln(t, strings.TrimSpace(strings.Join([]string{verb, t.family(), t.table, object}, " ")))
}

func (t *Text) family() string {
	if t.rules.Family == tracker.IPv6 {
		return "ip6"
	}
	return "ip"
}

// define writes the definition of an object.
func (t *Text) define(object string, lines []string) {
	if !t.block {
		fmt.Fprintf(t, "table %s %s {\n", t.family(), t.table)
		t.block = true
	}
	fmt.Fprintf(t, "\t%s {\n", object)
	for _, line := range lines {
		fmt.Fprintf(t, "\t\t%s\n", line)
	}
	t.WriteString("\t}\n")
}

// close ends the definition of the table.
func (t *Text) close() {
	if t.block {
		t.WriteString("}\n")
		t.block = false
	}
}

func (t *Text) object(o *model.Object) {
	const flowtable = "hook ingress priority 0"
	switch o.Kind {
	case model.CreateTable:
		t.command("add table", "")
	case model.CreateNewTable:
		t.command("create table", "")
	case model.DeleteTable:
		t.command("delete table", "")
	case model.DeleteRules:
		t.command("flush table", "")
	case model.NewSet:
		t.set(o.Set, o.Size)
	case model.DeleteSet:
		t.command("delete set", o.Name)
	case model.NewFlowtable:
		t.define("flowtable "+layout.FastPath, []string{flowtable, "counter"})
	case model.DeleteFlowtable:
		t.command("delete flowtable", o.Name)
	case model.AddDevices, model.DeleteDevices:
		verb := map[model.Kind]string{model.AddDevices: "add flowtable", model.DeleteDevices: "delete flowtable"}[o.Kind]
		t.command(verb, layout.FastPath+" { "+flowtable+"; devices = { "+strings.Join(o.Names, ", ")+" }; }")
	case model.SourceRule:
		t.command("insert rule", layout.ChainFirewallCheck+" "+t.rules.SourceRule(o))
	case model.DeleteChain:
		t.command("delete chain", o.Name)
	default:
		t.chains(o)
	}
}

func (t *Text) set(s layout.Set, size int) {
	kind, lines := "set ", []string{s.Types(t.rules.Family)}
	if s.Spec(t.rules.Family).DataType != 0 {
		kind = "map "
	}
	if size != 0 {
		lines = append(lines, fmt.Sprintf("size %d", size))
	}
	if flags := s.Flags(t.rules.Family); flags != nil {
		lines = append(lines, "flags "+strings.Join(flags, ","))
	}
	t.define(kind+s.Name(), lines)
}

func (t *Text) chains(o *model.Object) {
	for _, c := range t.rules.Chains(o) {
		lines := c.Rules
		if c.Hook != "" {
			lines = append([]string{c.Hook}, lines...)
		}
		t.define("chain "+c.Name, lines)
	}
}

// ElementText returns an element as nft reads it.
func ElementText(e *model.Edit) string {
	sp := e.Set.Spec(e.Family)
	key, data := e.Key.Bytes(), e.Data.Bytes()
	if e.Set.Interval() {
		return intervalText(key, data)
	}
	out := nft.ValueText(sp.KeyType, key)
	if e.Timeout != 0 {
		out += fmt.Sprintf(" timeout %dms expires %dms", e.Timeout.Milliseconds(), e.Left.Milliseconds())
	}
	switch {
	case e.Deletion:
	case e.Set.Verdicts():
		out += " : goto " + e.Text
	default:
		if e.Text != "" {
			out += ` comment "` + nft.Printable(e.Text) + `"`
		}
		if len(data) != 0 {
			out += " : " + nft.ValueText(sp.DataType, data)
		}
	}
	return out
}

// intervalText returns the addresses from first to the one before end, or to the last one of all if end is
// empty.
func intervalText(first, end []byte) string {
	from, _ := netip.AddrFromSlice(first)
	to, _ := netip.AddrFromSlice(slices.Repeat([]byte{0xff}, len(first)))
	if behind, ok := netip.AddrFromSlice(end); ok {
		to = behind.Prev()
	}
	return model.Range{First: from, Last: to}.String()
}
