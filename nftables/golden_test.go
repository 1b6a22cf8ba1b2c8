//go:build linux

package nftables

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/tracker"
)

var update = flag.Bool("update", false, "rewrite the golden listings in testdata")

// goldenVersion is the release of the nft tool that wrote the golden listings.
const goldenVersion = "v1.0.6"

// TestListingMatchesGolden programs a Service of every kind and compares the nft tool's listing
// with testdata. So an operator can read the listing, and the tool can print it.
func TestListingMatchesGolden(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	version, _ := r.host.Run(t, "nft", "--version")
	netlab.Need(t, strings.Contains(version, goldenVersion), "nft "+goldenVersion)
	setEveryKind(r.tracker)
	r.sync()
	r.verify()
	r.compareListing(map[string]string{"ip": "listing-ipv4.nft", "ip6": "listing-ipv6.nft"}, normal)
}

// TestListingOfChoiceMatchesGolden is like TestListingMatchesGolden, for Services that choose by
// weights and by hashes. It leaves out the endpoints of buckets.
func TestListingOfChoiceMatchesGolden(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	version, _ := r.host.Run(t, "nft", "--version")
	netlab.Need(t, strings.Contains(version, goldenVersion), "nft "+goldenVersion)
	for i, edit := range []func(*v1.Service){
		func(*v1.Service) {},
		func(s *v1.Service) { worldgen.SetHash(s, tracker.HashSource) },
		func(s *v1.Service) { worldgen.SetHash(s, tracker.HashSourcePort) },
		func(s *v1.Service) {
			worldgen.SetHash(s, tracker.HashSourcePort)
			sticky(600)(s)
		},
	} {
		r.tracker.SetService(svc(i, edit))
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			es := epSlice(i, f, 10*i+1, 10*i+2)
			if i == 0 {
				worldgen.SetWeight(es, es.Endpoints[0].Addresses[0], 2)
			}
			r.tracker.SetSlice(es)
		}
	}
	r.sync()
	r.verify()
	buckets := regexp.MustCompile(`(?s)(map (?:tcp-endpoints|sticky-buckets) \{[^=]*)elements = \{.*?\}\n`)
	r.compareListing(map[string]string{"ip": "choice-ipv4.nft", "ip6": "choice-ipv6.nft"}, func(listing string) string {
		return normal(buckets.ReplaceAllString(listing, "$1...\n"))
	})
}

// compareListing compares the listings of the families' tables with testdata.
func (r *rig) compareListing(files map[string]string, normal func(string) string) {
	r.Helper()
	for family, name := range files {
		got := normal(r.nft(fmt.Sprintf("list table %s %s", family, DefaultTable)))
		path := filepath.Join("testdata", name)
		if *update {
			must.Do(r, os.WriteFile(path, []byte(got), 0o644))
		}
		want := must.Get(os.ReadFile(path))(r)
		if got != string(want) {
			r.Errorf("%s: listing differs (go test -run Listing -update rewrites it):\n%s", path, backendtest.FirstDifference(got, string(want)))
		}
	}
}
