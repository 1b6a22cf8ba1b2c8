//go:build linux

package takeover

import (
	"context"
	"errors"
	"fmt"
	"slices"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/nft"
	"github.com/go-proxier/proxier/tracker"
)

// markerChain is the only chain of a marker, and kubeProxyTable the name of the tables of
// kube-proxy's nftables mode.
const (
	markerChain    = "nodeproxy-marker"
	kubeProxyTable = "kube-proxy"
)

// A marker is a table named like kube-proxy's, with one chain that no packet enters. Other
// programs look for kube-proxy's chains to find out whether Services are in nftables: Calico's
// Felix, with NFTablesMode Auto, chooses its own data plane by them.
var (
	tableAttr   = []nl.Attribute{nft.String(unix.NFTA_TABLE_NAME, kubeProxyTable)}
	chainAttrs  = []nl.Attribute{nft.String(unix.NFTA_CHAIN_TABLE, kubeProxyTable), nft.String(unix.NFTA_CHAIN_NAME, markerChain)}
	newTable    = nft.Request{Type: unix.NFT_MSG_NEWTABLE, Flags: nl.Create, Attrs: tableAttr}
	deleteTable = nft.Request{Type: unix.NFT_MSG_DELTABLE, Attrs: tableAttr}
	newChain    = nft.Request{Type: unix.NFT_MSG_NEWCHAIN, Flags: nl.Create, Attrs: chainAttrs}
)

// Mark makes the markers that are missing in the calling thread's network namespace.
func Mark(served []tracker.Family) (err error) {
	for _, f := range served {
		err = errors.Join(err, edit(f, newTable, newChain))
	}
	return err
}

// Replace replaces the tables of kube-proxy, with all of their rules, by markers: in one transaction, and
// in families that are not served, too. It makes those that are missing in served families.
func Replace(served []tracker.Family) (err error) {
	for _, f := range families {
		requests := []nft.Request{deleteTable, newTable, newChain}
		if slices.Contains(served, f) {
			requests = slices.Insert(requests, 0, newTable) // there must be one to delete
		}
		if e := edit(f, requests...); !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// Unmark deletes the markers in the calling thread's network namespace. It leaves tables of
// kube-proxy.
func Unmark(ctx context.Context) error {
	families, err := Marked(ctx)
	for _, f := range families {
		err = errors.Join(err, edit(f, deleteTable))
	}
	return err
}

// edit commits requests about kube-proxy's table of a family.
func edit(f tracker.Family, requests ...nft.Request) error {
	conn, err := nft.Dial(nil)
	if err == nil {
		defer conn.Close()
		requests = slices.Clone(requests)
		for i := range requests {
			requests[i].Family = nfproto(f)
		}
		err = conn.Commit(requests...)
	}
	if err != nil {
		return fmt.Errorf("cannot edit table %s: %w", kubeProxyTable, err)
	}
	return nil
}

// Marked returns the families that have a marker in the calling thread's network namespace.
func Marked(ctx context.Context) ([]tracker.Family, error) {
	conn, err := nft.Dial(nil)
	if err != nil {
		return nil, fmt.Errorf("cannot read table %s: %w", kubeProxyTable, err)
	}
	defer conn.Close()
	r := reader{ctx: ctx, conn: conn}
	out := r.marked()
	return out, r.err
}

// marked returns the families in which kube-proxy's table has markerChain and nothing else.
func (r *reader) marked() (out []tracker.Family) {
	for _, f := range families {
		var use uint64 // the number of chains, sets and other objects
		r.get(nft.Request{Type: unix.NFT_MSG_GETTABLE, Family: nfproto(f), Attrs: tableAttr}, func(typ uint16, data []byte) {
			if typ == unix.NFTA_TABLE_USE {
				use = nft.Uint(data)
			}
		})
		if use == 1 && r.get(nft.Request{Type: unix.NFT_MSG_GETCHAIN, Family: nfproto(f), Attrs: chainAttrs}, func(uint16, []byte) {}) {
			out = append(out, f)
		}
	}
	return out
}
