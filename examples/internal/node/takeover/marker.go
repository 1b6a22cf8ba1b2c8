//go:build linux

package takeover

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/tracker"
)

// A marker is a table named like kube-proxy's, with one chain that no packet enters. Other
// programs look for kube-proxy's chains to find out whether Services are in nftables: Calico's
// Felix, with NFTablesMode Auto, chooses its own data plane by them.
const (
	markerChain    = "nodeproxy-marker"
	kubeProxyTable = "kube-proxy" // of its nftables mode
)

// Mark makes the markers that are missing in the calling thread's network namespace, in served families. With
// replace, they replace the tables of kube-proxy, with all of their rules: in one transaction, and in families that
// are not served, too.
func Mark(served []tracker.Family, replace bool) (err error) {
	for _, f := range families {
		serves := slices.Contains(served, f)
		if !serves && !replace {
			continue
		}
		e := edit(f, func(t nft.Table) {
			if serves {
				t.Create(0) // there must be one to delete
			}
			if replace {
				t.Delete()
				t.Create(0)
			}
			t.CreateChain(markerChain, nil)
		})
		if !errors.Is(e, unix.ENOENT) {
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
		err = errors.Join(err, edit(f, nft.Table.Delete))
	}
	return err
}

// edit commits what do writes about kube-proxy's table of a family.
func edit(f tracker.Family, do func(nft.Table)) error {
	conn, err := nft.Dial(nil, sendBuffer)
	if err == nil {
		defer conn.Close()
		t := nft.Table{Batch: &nft.Batch{}, Family: inet.AF(f), Name: kubeProxyTable}
		t.Reset()
		do(t)
		err = conn.Commit(t.Batch)
	}
	if err != nil {
		return fmt.Errorf("cannot edit table %s: %w", kubeProxyTable, err)
	}
	return nil
}

// Marked returns the families that have a marker in the calling thread's network namespace.
func Marked(ctx context.Context) (out []tracker.Family, err error) {
	if err = read(ctx, func(r *reader) { out = r.marked() }); err != nil {
		return nil, fmt.Errorf("cannot read table %s: %w", kubeProxyTable, err)
	}
	return out, nil
}

// marked returns the families in which kube-proxy's table has markerChain and nothing else.
func (r *reader) marked() (out []tracker.Family) {
	for _, f := range families {
		var use uint32 // the number of chains, sets and other objects
		r.get(unix.NFT_MSG_GETTABLE, f, false, nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, kubeProxyTable), func(typ uint16, data []byte) {
			if typ == unix.NFTA_TABLE_USE {
				use = nfnl.Uint32(data)
			}
		})
		if use != 1 || r.err != nil {
			continue
		}
		var marker bool
		if marker, r.err = r.HasBaseChain(kubeProxyTable, inet.AF(f), markerChain); marker {
			out = append(out, f)
		}
	}
	return out
}
