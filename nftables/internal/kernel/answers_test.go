//go:build linux

package kernel

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
)

// FuzzAnswers reads arbitrary bytes as the kernel's answers about elements.
func FuzzAnswers(f *testing.F) {
	attr := nfnl.AppendBytes
	value := func(v ...byte) []byte { return attr(nil, unix.NFTA_DATA_VALUE, v) }
	one := attr(nil, unix.NFTA_SET_ELEM_KEY, value(1, 0, 1, 0x80))
	one = attr(one, unix.NFTA_SET_ELEM_DATA, value(10, 0, 0, 1, 0, 80, 0, 0))
	one = attr(one, unix.NFTA_SET_ELEM_USERDATA, append([]byte{0, 7}, "0 ns/a\x00"...))
	verdict := attr(nil, unix.NFTA_VERDICT_CODE, []byte{255, 255, 255, 252})
	verdict = nfnl.AppendString(verdict, unix.NFTA_VERDICT_CHAIN, "pool-3")
	jump := attr(attr(nil, unix.NFTA_SET_ELEM_KEY, value(1, 2, 3, 4)), unix.NFTA_SET_ELEM_DATA, attr(nil, unix.NFTA_DATA_VERDICT, verdict))
	end := attr(attr(nil, unix.NFTA_SET_ELEM_KEY, value(11, 0, 0, 0)), unix.NFTA_SET_ELEM_FLAGS, []byte{0, 0, 0, unix.NFT_SET_ELEM_INTERVAL_END})
	list := attr(attr(attr(nil, unix.NFTA_LIST_ELEM, one), unix.NFTA_LIST_ELEM, jump), unix.NFTA_LIST_ELEM, end)
	f.Add(attr(nil, unix.NFTA_SET_ELEM_LIST_ELEMENTS, list))
	f.Add(list)
	f.Add(list[:len(list)/2])
	f.Add([]byte{})
	f.Add([]byte{4, 0, 1, 0, 4, 0, 2, 0})
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		var all []nft.Element
		for _, list := range nfnl.Attributes(data) {
			all = append(all, nft.ParseElement(list))
			for _, one := range nfnl.Attributes(list) {
				all = append(all, nft.ParseElement(one))
			}
		}
		adopted := model.NewAdopted()
		var bounds []model.Bound
		for _, e := range all {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				bounds = append(bounds, model.Bound{Addr: a, End: e.IntervalEnd})
			}
			adopted.Add(e.Key, e.Data, e.Comment)
			if a, ok := layout.ParseAddrPort(e.Data); ok && !a.Addr().IsValid() {
				t.Errorf("%x is %v", e.Data, a)
			}
		}
		for _, r := range model.RangesOf(bounds) {
			if !r.First.IsValid() {
				t.Errorf("a range without a beginning: %v", r)
			}
		}
	})
}
