//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"testing"

	gnft "github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// The benchmarks in this file compare netlink messages of this package with
// github.com/google/nftables in the same kernel. They justify the messages and the readers
// of package kernel. The package uses the library for everything that the library does within
// twice the time and memory.

// comparison is a table with one map of 32-bit numbers to 32-bit numbers, and a
// connection of either kind.
type comparison struct {
	ours    *kernel.Conn
	library *gnft.Conn
	set     *gnft.Set
}

func compare(b *testing.B, elements int) *comparison {
	b.Helper()
	h := netlab.NewHost(b)
	c := &comparison{}
	c.ours = must.Get(kernel.Dial(h.File(), kernel.SendBuffer))(b)
	b.Cleanup(func() { c.ours.Close() })
	c.library = must.Get(gnft.New(gnft.WithNetNSFd(int(h.File().Fd())), gnft.AsLasting()))(b)
	b.Cleanup(func() { c.library.CloseLasting() })
	t := c.library.AddTable(&gnft.Table{Name: "compared", Family: gnft.TableFamilyIPv4})
	c.set = &gnft.Set{Table: t, Name: layout.Endpoints.Name(), IsMap: true, KeyType: gnft.TypeInteger, DataType: gnft.TypeInteger, Size: 1 << 18}
	must.Do(b, c.library.AddSet(c.set, nil))
	must.Do(b, c.library.Flush())
	var batch nft.Batch
	for from := 0; from < elements; from += 10000 {
		batch.Reset()
		c.write(&batch, unix.NFT_MSG_NEWSETELEM, from, min(10000, elements-from))
		must.Do(b, c.ours.Commit(&batch))
	}
	return c
}

// write adds messages to a batch that add or delete n elements.
func (c *comparison) write(batch *nft.Batch, typ uint16, from, n int) {
	var e nft.Elements
	for i := range n {
		var word [4]byte
		binary.BigEndian.PutUint32(word[:], uint32(from+i))
		e.Add(word[:], word[:], "")
	}
	batch.Elements(typ, 0, unix.NFPROTO_IPV4, "compared", layout.Endpoints.Name(), &e)
}

// elements returns n elements in the library's form.
func (c *comparison) elements(from, n int) []gnft.SetElement {
	out := make([]gnft.SetElement, n)
	for i := range out {
		word := binary.BigEndian.AppendUint32(nil, uint32(from+i))
		out[i] = gnft.SetElement{Key: word, Val: word}
	}
	return out
}

// BenchmarkLibraryWrite replaces elements of a map of 10,000 by as many others, in one
// transaction: one element, as a changed endpoint does, or 5,000, as a cold start does.
func BenchmarkLibraryWrite(b *testing.B) {
	for _, n := range []int{1, 5000} {
		run := func(name string, replace func(c *comparison, old, now int) error) {
			b.Run(fmt.Sprintf("elements=%d/%s", n, name), func(b *testing.B) {
				c := compare(b, 10000)
				old, now := 0, 20000
				b.ReportAllocs()
				for b.Loop() {
					must.Do(b, replace(c, old, now))
					old, now = now, old
				}
			})
		}
		var batch nft.Batch
		run("ours", func(c *comparison, old, now int) error {
			batch.Reset()
			c.write(&batch, unix.NFT_MSG_DELSETELEM, old, n)
			c.write(&batch, unix.NFT_MSG_NEWSETELEM, now, n)
			return c.ours.Commit(&batch)
		})
		run("library", func(c *comparison, old, now int) error {
			if err := c.library.SetDeleteElements(c.set, c.elements(old, n)); err != nil {
				return err
			}
			if err := c.library.SetAddElements(c.set, c.elements(now, n)); err != nil {
				return err
			}
			return c.library.Flush()
		})
	}
}

// BenchmarkLibraryReadElements reads a map back, as a restart does.
func BenchmarkLibraryReadElements(b *testing.B) {
	for _, n := range []int{1000, 50000} {
		b.Run(fmt.Sprintf("elements=%d/ours", n), func(b *testing.B) {
			c := compare(b, n)
			b.ReportAllocs()
			for b.Loop() {
				found := 0
				err := c.ours.Elements("compared", tracker.IPv4, layout.Endpoints, func(nft.Element) { found++ })
				if err != nil || found != n {
					b.Fatalf("%d elements, %v", found, err)
				}
			}
		})
		b.Run(fmt.Sprintf("elements=%d/library", n), func(b *testing.B) {
			c := compare(b, n)
			b.ReportAllocs()
			for b.Loop() {
				found, err := c.library.GetSetElements(c.set)
				if err != nil || len(found) != n {
					b.Fatalf("%d elements, %v", len(found), err)
				}
			}
		})
	}
}

// BenchmarkLibraryList lists the table of a backend with its sets, chains and rules. A restart
// does so, and a check after a transaction of another process.
func BenchmarkLibraryList(b *testing.B) {
	h := netlab.NewHost(b)
	p := newPipeline(b, h.File())
	defer p.backend.Close()
	p.take(newWorld(sizes[0]))
	p.sync(b)
	var sets, chains, rules int
	b.Run("ours", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			head, err := p.backend.conn.Table(DefaultTable, tracker.IPv4)
			if err != nil || !head.Exists {
				b.Fatal(err)
			}
			s := must.Get(p.backend.conn.Sets(DefaultTable, tracker.IPv4))(b)
			c := must.Get(p.backend.conn.Chains(DefaultTable, tracker.IPv4))(b)
			r := must.Get(p.backend.conn.Rules(DefaultTable, tracker.IPv4))(b)
			sets, chains, rules = len(s), len(c), len(r)
		}
	})
	b.Run("library", func(b *testing.B) {
		library := must.Get(gnft.New(gnft.WithNetNSFd(int(h.File().Fd())), gnft.AsLasting()))(b)
		defer library.CloseLasting()
		b.ReportAllocs()
		for b.Loop() {
			table := must.Get(library.ListTableOfFamily(DefaultTable, gnft.TableFamilyIPv4))(b)
			s := must.Get(library.GetSets(table))(b)
			all := must.Get(library.ListChainsOfTableFamily(gnft.TableFamilyIPv4))(b)
			r := 0
			for _, chain := range all {
				list := must.Get(library.GetRules(table, chain))(b)
				r += len(list)
			}
			if len(s) != sets || len(all) != chains || r != rules {
				b.Fatalf("%d sets, %d chains, %d rules, want %d, %d, %d", len(s), len(all), r, sets, chains, rules)
			}
		}
	})
}
