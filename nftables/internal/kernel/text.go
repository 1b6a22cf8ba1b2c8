package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// Text writes transactions as nft reads them: what a [Writer] writes for the kernel.
type Text struct {
	strings.Builder
	Lists
	table  string
	rules  [2]Rules
	family tracker.Family
	// block is set within the definition of a table.
	block bool
}

// NewText returns a Text about the table of a name. rules renders the chains of the families' tables.
func NewText(table string, rules ...Rules) *Text {
	t := &Text{table: table}
	for _, r := range rules {
		t.rules[index(r.Family)] = r
	}
	return t
}

// Reset empties the text.
func (t *Text) Reset() { *t = *NewText(t.table, t.rules[:]...) }

// Use makes what is written from now on be about the table of another name.
func (t *Text) Use(table string) {
	t.close()
	t.table = table
}

// Add writes the objects of a transaction, and keeps its elements for Finish.
func (t *Text) Add(tx *model.Tx) {
	for i := range tx.Objects {
		t.object(&tx.Objects[i])
	}
	t.close()
	for i := range tx.Edits {
		t.Edit(&tx.Edits[i])
	}
}

// Finish writes the elements that Add got.
func (t *Text) Finish() {
	t.Each(func(f tracker.Family, s layout.Set, deletion bool, list *nft.Elements) {
		verb := "create element"
		switch {
		case deletion:
			verb = "delete element"
		case s.Interval():
			verb = "add element" // the kernel refuses the tool's form of create
		}
		t.Elements(verb, f, s, list)
	})
	t.Lists.Reset()
}

// Elements writes a command about elements.
func (t *Text) Elements(verb string, f tracker.Family, s layout.Set, list *nft.Elements) {
	t.in(f)
	t.command(verb, s.Name()+" {\n\t"+strings.Join(ElementTexts(s.Spec(f), list.Each), ",\n\t")+"\n}")
}

// in makes what follows be about a family's table.
func (t *Text) in(f tracker.Family) {
	if f != t.family {
		t.close()
		t.family = f
	}
}

func (t *Text) command(verb, object string) {
	t.close()
	fmt.Fprintln(t, strings.TrimSpace(strings.Join([]string{verb, t.familyName(), t.table, object}, " ")))
}

func (t *Text) familyName() string {
	if t.family == tracker.IPv6 {
		return "ip6"
	}
	return "ip"
}

func (t *Text) define(object string, lines []string) {
	if !t.block {
		fmt.Fprintf(t, "table %s %s {\n", t.familyName(), t.table)
		t.block = true
	}
	fmt.Fprintf(t, "\t%s {\n", object)
	for _, line := range lines {
		fmt.Fprintf(t, "\t\t%s\n", line)
	}
	t.WriteString("\t}\n")
}

func (t *Text) close() {
	if t.block {
		t.WriteString("}\n")
		t.block = false
	}
}

func (t *Text) object(o *model.Object) {
	const flowtable = "hook ingress priority 0"
	t.in(o.Family)
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
		if len(o.Names) == 0 {
			return
		}
		verb := map[model.Kind]string{model.AddDevices: "add flowtable", model.DeleteDevices: "delete flowtable"}[o.Kind]
		t.command(verb, layout.FastPath+" { "+flowtable+"; devices = { "+strings.Join(o.Names, ", ")+" }; }")
	case model.SourceRule:
		t.command("insert rule", layout.ChainFirewallCheck+" "+t.rules[index(o.Family)].SourceRule(o))
	case model.DeleteChain:
		t.command("delete chain", o.Name)
	default:
		t.chains(o)
	}
}

func (t *Text) set(s layout.Set, size int) {
	kind, lines := "set ", []string{s.Types(t.family)}
	if s.Spec(t.family).DataType != 0 {
		kind = "map "
	}
	if size != 0 {
		lines = append(lines, fmt.Sprintf("size %d", size))
	}
	if flags := s.Flags(t.family); flags != nil {
		lines = append(lines, "flags "+strings.Join(flags, ","))
	}
	t.define(kind+s.Name(), lines)
}

func (t *Text) chains(o *model.Object) {
	for _, c := range t.rules[index(o.Family)].Chains(o) {
		lines := c.Rules
		if c.Hook != "" {
			lines = append([]string{c.Hook}, lines...)
		}
		t.define("chain "+c.Name, lines)
	}
}

// ElementTexts returns elements of a set as nft reads them. each calls a function with each element, and
// with the end of an interval directly after its begin.
func ElementTexts(sp nft.Spec, each func(func(nft.Element))) (out []string) {
	var first []byte // of an interval
	each(func(e nft.Element) {
		switch {
		case sp.Flags&nft.FlagInterval == 0:
			out = append(out, elementText(sp, &e))
		case e.IntervalEnd:
			out[len(out)-1] = intervalText(first, e.Key)
		default:
			first = e.Key
			out = append(out, intervalText(first, nil))
		}
	})
	return out
}

func elementText(sp nft.Spec, e *nft.Element) string {
	out := nft.ValueText(sp.KeyType, e.Key)
	if e.Timeout != nil {
		out += fmt.Sprintf(" timeout %dms expires %dms", nfnl.Uint64(e.Timeout), nfnl.Uint64(e.Expiration))
	}
	if e.Comment != "" {
		out += ` comment "` + e.Comment + `"`
	}
	switch {
	case e.Chain != "":
		verb := "jump "
		if e.Goto {
			verb = "goto "
		}
		out += " : " + verb + e.Chain
	case len(e.Data) != 0:
		out += " : " + nft.ValueText(sp.DataType, e.Data)
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
