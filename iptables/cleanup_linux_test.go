package iptables

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// TestCleanupCanBeTriedAgain uses a verdict map, which iptables-save does not print, to keep a chain of table
// nat from being deleted.
func TestCleanupCanBeTriedAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, onLinux(NFT))
	r.everyKind()
	r.sync()
	nft := func(command string) {
		t.Helper()
		must.Get(r.host().Run(t, "nft", command))(t)
	}
	nft("add map ip nat foreign { type inet_service : verdict; elements = { 99 : jump KUBE-MARK-MASQ }; }")
	for range 2 {
		if err := CleanupOwn(r.Context(), r.config); err == nil || !strings.Contains(err.Error(), "KUBE-MARK-MASQ") {
			t.Errorf("CleanupOwn returned %v, want that KUBE-MARK-MASQ is in use", err)
		}
	}
	if owned, err := r.owned(); err != nil || !owned {
		t.Errorf("the rules that are left are a Backend's: %v, error %v", owned, err)
	}
	nft("delete map ip nat foreign")
	if err := CleanupOwn(r.Context(), r.config); err != nil {
		t.Error(err)
	}
	if saved := r.command(tracker.IPv4, "-save"); strings.Contains(saved, "KUBE-") {
		t.Errorf("after the clean-up:\n%s", saved)
	}
}
