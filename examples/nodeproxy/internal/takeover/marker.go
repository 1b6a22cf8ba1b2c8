//go:build linux

package takeover

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/tracker"
)

// markerChain is the only chain of a marker.
const markerChain = "nodeproxy-marker"

// kubeProxyTable is the name of the tables of kube-proxy's nftables mode.
const kubeProxyTable = "kube-proxy"

// A marker is a table named like kube-proxy's, with one chain that no packet enters. Other
// programs look for kube-proxy's chains to find out whether Services are in nftables: Calico's
// Felix, with NFTablesMode Auto, chooses its own data plane by them.

// Mark makes markers in the calling thread's network namespace. A table of kube-proxy, with all of
// its rules, is replaced by the marker in one transaction.
func Mark(families []tracker.Family) error {
	return edit(families, func(t nfnl.Table) {
		t.Create(0) // there must be one to delete
		t.Delete()
		t.Create(0)
		t.Chain(markerChain, nil)
	})
}

// Replace is Mark for the given families, and for each other family in which kube-proxy's table
// exists: kube-proxy writes rules in families that the agent does not serve.
func Replace(ctx context.Context, served []tracker.Family) error {
	var k Kernel
	defer k.close()
	if err := k.open(); err != nil {
		return err
	}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if slices.Contains(served, f) {
			continue
		}
		found, err := k.exists(ctx, unix.NFT_MSG_GETTABLE, nfproto(f), nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, kubeProxyTable))
		if err != nil {
			return fmt.Errorf("cannot read table %s: %w", kubeProxyTable, err)
		}
		if found {
			served = append(slices.Clip(served), f)
		}
	}
	return Mark(served)
}

func nfproto(f tracker.Family) uint8 {
	if f == tracker.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// Unmark deletes the markers in the calling thread's network namespace. It leaves tables of
// kube-proxy.
func Unmark(ctx context.Context) error {
	var k Kernel
	defer k.close()
	marked, err := k.markers(ctx)
	if err != nil || len(marked) == 0 {
		return err
	}
	return edit(marked, nfnl.Table.Delete)
}

// edit calls fn with kube-proxy's table of each family and commits what fn writes.
func edit(families []tracker.Family, fn func(nfnl.Table)) error {
	conn, err := nfnl.Dial(nil)
	if err != nil {
		return fmt.Errorf("cannot edit table %s: %w", kubeProxyTable, err)
	}
	defer conn.Close()
	b := &nfnl.Batch{}
	b.Reset()
	for _, f := range families {
		fn(nfnl.Table{Batch: b, Family: nfproto(f), Name: kubeProxyTable})
	}
	if err := conn.Commit(b); err != nil {
		return fmt.Errorf("cannot edit table %s: %w", kubeProxyTable, err)
	}
	return nil
}

// markers returns the families that have a marker.
func (k *Kernel) markers(ctx context.Context) (out []tracker.Family, err error) {
	if err := k.open(); err != nil {
		return nil, err
	}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		marker, err := k.isMarker(ctx, nfproto(f))
		if err != nil {
			return nil, fmt.Errorf("cannot read table %s: %w", kubeProxyTable, err)
		}
		if marker {
			out = append(out, f)
		}
	}
	return out, nil
}

// isMarker reports whether kube-proxy's table exists and has markerChain and nothing else.
func (k *Kernel) isMarker(ctx context.Context, family uint8) (bool, error) {
	var use uint32 // the number of chains, sets and other objects
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETTABLE, Family: family, Attrs: nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, kubeProxyTable)}
	err := k.get(ctx, r, func(typ uint16, data []byte) {
		if typ == unix.NFTA_TABLE_USE {
			use = nfnl.Uint32(data)
		}
	})
	if errors.Is(err, unix.ENOENT) || err == nil && use != 1 {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	attrs := nfnl.AppendString(nfnl.AppendString(nil, unix.NFTA_CHAIN_TABLE, kubeProxyTable), unix.NFTA_CHAIN_NAME, markerChain)
	return k.exists(ctx, unix.NFT_MSG_GETCHAIN, family, attrs)
}
