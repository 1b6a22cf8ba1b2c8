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

// markerChain is the only chain of a marker.
const markerChain = "nodeproxy-marker"

// kubeProxyTable is the name of the tables of kube-proxy's nftables mode.
const kubeProxyTable = "kube-proxy"

// The attributes of requests about a marker and its chain.
var (
	tableAttr  = []nl.Attribute{nft.String(unix.NFTA_TABLE_NAME, kubeProxyTable)}
	chainAttrs = []nl.Attribute{nft.String(unix.NFTA_CHAIN_TABLE, kubeProxyTable), nft.String(unix.NFTA_CHAIN_NAME, markerChain)}
)

// A marker is a table named like kube-proxy's, with one chain that no packet enters. Other
// programs look for kube-proxy's chains to find out whether Services are in nftables: Calico's
// Felix, with NFTablesMode Auto, chooses its own data plane by them.

// Mark makes markers in the calling thread's network namespace. A table of kube-proxy, with all of
// its rules, is replaced by the marker in one transaction.
func Mark(families []tracker.Family) error {
	create := nft.Request{Type: unix.NFT_MSG_NEWTABLE, Flags: nl.Create, Attrs: tableAttr}
	return edit(families,
		create, // there must be one to delete
		nft.Request{Type: unix.NFT_MSG_DELTABLE, Attrs: tableAttr},
		create,
		nft.Request{Type: unix.NFT_MSG_NEWCHAIN, Flags: nl.Create, Attrs: chainAttrs})
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
		found, err := k.exists(ctx, unix.NFT_MSG_GETTABLE, nfproto(f), tableAttr...)
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
	return edit(marked, nft.Request{Type: unix.NFT_MSG_DELTABLE, Attrs: tableAttr})
}

// edit commits requests about kube-proxy's table for each family.
func edit(families []tracker.Family, requests ...nft.Request) error {
	conn, err := nft.Dial(nil)
	if err != nil {
		return fmt.Errorf("cannot edit table %s: %w", kubeProxyTable, err)
	}
	defer conn.Close()
	var all []nft.Request
	for _, f := range families {
		for _, r := range requests {
			r.Family = nfproto(f)
			all = append(all, r)
		}
	}
	if err := conn.Commit(all...); err != nil {
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
	var use uint64 // the number of chains, sets and other objects
	r := nft.Request{Type: unix.NFT_MSG_GETTABLE, Family: family, Attrs: tableAttr}
	err := k.get(ctx, r, func(typ uint16, data []byte) {
		if typ == unix.NFTA_TABLE_USE {
			use = nft.Uint(data)
		}
	})
	if errors.Is(err, unix.ENOENT) || err == nil && use != 1 {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return k.exists(ctx, unix.NFT_MSG_GETCHAIN, family, chainAttrs...)
}
