//go:build linux

package kernel

import (
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// Writer encodes transactions as one batch: objects in their order, then the elements to delete and
// the elements to add. It keeps its memory from one batch to the next.
type Writer struct {
	Lists
	table    string
	rules    [2]Rules
	batch    nft.Batch
	finished bool
	err      error
}

// NewWriter returns a Writer for tables of a name. rules renders the chains of the families' tables.
func NewWriter(table string, rules ...Rules) *Writer {
	w := &Writer{table: table}
	for _, r := range rules {
		w.rules[index(r.Family)] = r
	}
	w.Reset()
	return w
}

// Reset empties the writer.
func (w *Writer) Reset() {
	w.batch.Reset()
	w.Lists.Reset()
	w.finished, w.err = false, nil
}

// Use makes what is encoded from now on be about tables of another name.
func (w *Writer) Use(table string) { w.table = table }

// Empty reports whether nothing was added.
func (w *Writer) Empty() bool { return w.Lists.Empty() && w.batch.Empty() }

// Add encodes a transaction, which becomes part of the batch.
func (w *Writer) Add(tx *model.Tx) {
	for i := range tx.Objects {
		w.object(&tx.Objects[i])
	}
	for i := range tx.Edits {
		w.Edit(&tx.Edits[i])
	}
}

// ObjectSize returns the bytes of an object in a batch. It changes nothing.
func (w *Writer) ObjectSize(o *model.Object) int {
	one := NewWriter(w.table, w.rules[:]...)
	empty := one.batch.Len()
	one.object(o)
	return one.batch.Len() - empty
}

// Finish encodes the elements that Add got. What is added afterwards must be objects.
func (w *Writer) Finish() error {
	w.batch.Grow(w.Size())
	w.Each(func(f tracker.Family, s layout.Set, deletion bool, list *nft.Elements) {
		if deletion {
			w.DeleteElements(f, s, list)
		} else {
			w.addElements(f, s, unix.NLM_F_EXCL, list)
		}
	})
	w.finished = true
	return w.err
}

// Commit commits the batch. It calls Finish, unless that was called.
func (w *Writer) Commit(conn *Conn) error {
	if !w.finished {
		if err := w.Finish(); err != nil {
			return err
		}
	}
	return conn.Commit(&w.batch)
}

// AddElements encodes elements now, instead of with the others in Finish. Elements that exist stay as
// they are.
func (w *Writer) AddElements(f tracker.Family, s layout.Set, list *nft.Elements) {
	w.addElements(f, s, 0, list)
}

// addElements encodes elements. With unix.NLM_F_EXCL, none may exist.
func (w *Writer) addElements(f tracker.Family, s layout.Set, flags uint16, list *nft.Elements) {
	w.batch.NoteOf("add elements to ", s)
	w.batch.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|flags, inet.AF(f), w.table, s.Name(), list)
}

// DeleteElements encodes deletions of elements now, instead of with the others in Finish.
func (w *Writer) DeleteElements(f tracker.Family, s layout.Set, list *nft.Elements) {
	w.batch.NoteOf("delete elements of ", s)
	w.batch.Elements(unix.NFT_MSG_DELSETELEM, 0, inet.AF(f), w.table, s.Name(), list)
}

func (w *Writer) in(f tracker.Family) nft.Table {
	return nft.Table{Batch: &w.batch, Family: inet.AF(f), Name: w.table}
}

func (w *Writer) object(o *model.Object) {
	t := w.in(o.Family)
	switch o.Kind {
	case model.CreateTable:
		t.Create(0)
	case model.CreateNewTable:
		t.Create(unix.NLM_F_EXCL)
	case model.DeleteTable:
		t.Delete()
	case model.DeleteRules:
		t.DeleteRules()
	case model.NewSet:
		t.CreateSet(o.Set.Name(), uint32(o.Set)+1, o.Set.Spec(o.Family), o.Set.UserData(o.Family), o.Size)
	case model.DeleteSet:
		t.DeleteSet(o.Name)
	case model.NewFlowtable:
		t.CreateFlowtable(layout.FastPath)
	case model.DeleteFlowtable:
		t.DeleteFlowtable(o.Name)
	case model.AddDevices:
		t.AddDevices(layout.FastPath, o.Names)
	case model.DeleteDevices:
		t.DeleteDevices(layout.FastPath, o.Names)
	case model.SourceRule:
		// The rule comes before the others of the chain.
		w.rule(t, layout.ChainFirewallCheck, o.Size, 0, w.rules[index(o.Family)].SourceRule(o))
	case model.DeleteChain:
		t.DeleteChain(o.Name)
	default:
		for _, c := range w.rules[index(o.Family)].Chains(o) {
			t.CreateChain(c.Name, c.Base)
			for i, r := range c.Rules {
				w.rule(t, c.Name, i, unix.NLM_F_APPEND, r)
			}
		}
	}
}

func (w *Writer) rule(t nft.Table, chain string, number int, flags uint16, rule string) {
	if err := t.Rule(chain, number, flags, rule); err != nil && w.err == nil {
		w.err = err
	}
}
