//go:build linux

package takeover

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
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
func Mark(served []tracker.Family, replace bool) error {
	edited := served
	if replace {
		edited = families
	}
	return edit(edited, func(f tracker.Family, t nft.Table) {
		if slices.Contains(served, f) {
			t.Create(0) // there must be one to delete
		}
		if replace {
			t.Delete()
			t.Create(0)
		}
		t.CreateChain(markerChain, nil)
	})
}

// Unmark deletes the markers in the calling thread's network namespace. It leaves tables of
// kube-proxy.
func Unmark() error {
	marked, err := Marked()
	return errors.Join(err, edit(marked, func(_ tracker.Family, t nft.Table) { t.Delete() }))
}

// edit commits what do writes about kube-proxy's table of each family. It ignores a table that is gone.
func edit(families []tracker.Family, do func(tracker.Family, nft.Table)) error {
	conn, err := nft.Dial(nil, sendBuffer)
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, f := range families {
		t := nft.Table{Batch: &nft.Batch{}, Family: inet.AF(f), Name: kubeProxyTable}
		t.Reset()
		do(f, t)
		if e := conn.Commit(t.Batch); e != nil && !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, fmt.Errorf("cannot edit table %s: %w", kubeProxyTable, e))
		}
	}
	return err
}

// Marked returns the families that have a marker in the calling thread's network namespace: in which kube-proxy's
// table has markerChain and no other chain.
func Marked() (out []tracker.Family, err error) {
	conn, err := nft.Dial(nil, sendBuffer)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	for _, f := range families {
		found, err := conn.HasBaseChain(kubeProxyTable, inet.AF(f), markerChain)
		var chains map[string]nft.Chain
		if found && err == nil {
			chains, err = conn.Chains(kubeProxyTable, inet.AF(f))
		}
		if err != nil {
			return nil, fmt.Errorf("cannot read table %s: %w", kubeProxyTable, err)
		}
		if len(chains) == 1 {
			out = append(out, f)
		}
	}
	return out, nil
}
