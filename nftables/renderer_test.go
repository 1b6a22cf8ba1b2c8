package nftables

import (
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func newRenderer(tb testing.TB, c Config) *Renderer {
	tb.Helper()
	r := must.Get(NewRenderer(c, tracker.IPv4))(tb)
	return r
}

// TestTransactionsAreValues renders without a kernel.
func TestTransactionsAreValues(t *testing.T) {
	t.Parallel()
	p := backendtest.NewNode(t, tracker.Config{})
	p.Tracker.SetService(svc(0))
	p.Tracker.SetSlice(epSlice(0, tracker.IPv4, 1, 2))
	r := newRenderer(t, Config{Table: "other"})
	needsFull := func(when string) {
		t.Helper()
		if tx, err := r.Render(&ruleset.Delta{Node: &ruleset.Node{}}); tx != nil || !errors.Is(err, ruleset.ErrNeedFull) {
			t.Errorf("an incremental delta %s: %v", when, err)
		}
	}
	needsFull("first")
	tx := must.Get(r.Render(p.Engine.Snapshot().Delta()))(t)
	text := tx.String()
	if text != tx.String() || !strings.HasPrefix(text, "create table ip other\n") {
		t.Errorf("text:\n%s", text)
	}
	hooked := slices.ContainsFunc(tx.Chains(), func(c Chain) bool {
		return c.Name == "nat-output" && strings.HasPrefix(c.Hook, "type nat hook output") && slices.Equal(c.Rules, []string{"jump services"})
	})
	if tx.Family() != tracker.IPv4 || tx.Empty() || !hooked {
		t.Errorf("family %v, chains %v", tx.Family(), tx.Chains())
	}
	if tx, err := r.Render(&ruleset.Delta{Node: p.Engine.Snapshot().Node}); err != nil || !tx.Empty() || tx.String() != "" {
		t.Errorf("no change: %v, %v", tx, err)
	}
	tx.Revert()
	needsFull("after Revert")
	if _, err := NewRenderer(Config{MasqueradeMark: 3}, tracker.IPv4); !errors.Is(err, ruleset.ErrConfig) {
		t.Errorf("two bits: %v", err)
	}
}

// TestOffloadTextIsListed compares the rules with those that the tool listed in a kernel with flowtables.
func TestOffloadTextIsListed(t *testing.T) {
	t.Parallel()
	golden := must.Get(os.ReadFile("testdata/offload-ipv4.nft"))(t)
	p := backendtest.NewNode(t, tracker.Config{})
	tx := must.Get(newRenderer(t, Config{Offload: &Offload{Interfaces: []string{"*"}, udp: true}}).Render(p.Engine.Snapshot().Delta()))(t)
	for _, c := range tx.Chains() {
		if c.Name != layout.ChainToFastPath && c.Name != layout.ChainFilterForward {
			continue
		}
		_, listed, _ := strings.Cut(string(golden), "chain "+c.Name+" {\n")
		listed, _, _ = strings.Cut(listed, "\t}\n")
		if !strings.HasSuffix(listed, "\t\t"+strings.Join(c.Rules, "\n\t\t")+"\n") {
			t.Errorf("chain %s: %q\nlisted:\n%s", c.Name, c.Rules, listed)
		}
	}
}

// setEveryKind sets a Service of every kind, as in the golden listings.
func setEveryKind(tr *tracker.Tracker) {
	seconds := int32(600)
	loadBalancer := func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].NodePort = 30080
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8:1::1"}}
		s.Spec.LoadBalancerSourceRanges = []string{"172.16.0.0/12", "2001:db8:2::/48"}
	}
	for i, edit := range []func(*v1.Service){
		func(*v1.Service) {},
		loadBalancer,
		func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeNodePort
			s.Spec.Ports[0].NodePort = 30081
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		},
		func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
		},
		func(s *v1.Service) { s.Spec.ExternalIPs = []string{"198.51.100.1", "2001:db8:3::1"} },
		func(*v1.Service) {}, // without endpoints
	} {
		tr.SetService(svc(i, edit))
		if i == 5 {
			continue
		}
		eps := []int{10*i + 1, 10*i + 2}
		if i == 4 {
			eps = upTo(18)
		}
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			tr.SetSlice(epSlice(i, f, eps...))
		}
	}
}

var elements = regexp.MustCompile(`(?s)elements = \{ (.*?) \}\n`)

// normal sorts the elements of each set and puts each on a line. The kernel lists them in the
// order of their hashes.
func normal(listing string) string {
	return elements.ReplaceAllStringFunc(listing, func(m string) string {
		list := strings.Split(elements.FindStringSubmatch(m)[1], ",")
		for i := range list {
			list[i] = "\t\t\t" + strings.TrimSpace(list[i])
		}
		slices.Sort(list)
		return "elements = {\n" + strings.Join(list, ",\n") + "\n\t\t}\n"
	})
}

// listed replaces what the tool writes in another way than the rules are written.
var listed = strings.NewReplacer("\n\n", "\n", "priority dstnat - 2;", "priority -102;", "priority dstnat - 1;", "priority -101;", "priority srcnat - 1;", "priority 99;",
	"priority filter;", "priority 0;", "timeout 10m", "timeout 600s", "ip saddr 10.", "ip saddr == 10.", "ip6 saddr fd00:10:244", "ip6 saddr == fd00:10:244")

// TestFakeListsWhatToolLists compares the listing of package fake with that of the tool, which are of tables
// by a Renderer and a Backend.
func TestFakeListsWhatToolLists(t *testing.T) {
	t.Parallel()
	p := backendtest.NewNode(t, tracker.Config{OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint})
	setEveryKind(p.Tracker)
	for f, file := range map[tracker.Family]string{tracker.IPv4: "listing-ipv4.nft", tracker.IPv6: "listing-ipv6.nft"} {
		r := must.Get(NewRenderer(Config{}, f))(t)
		tx := must.Get(r.Render(p.Engine.Snapshot().Delta()))(t)
		tables := fake.New()
		must.Do(t, tables.Load(tx.String()))
		golden := must.Get(os.ReadFile("testdata/" + file))(t)
		if got, want := tables.List(), listed.Replace(string(golden)); got != want {
			t.Errorf("%s differs: %s", file, backendtest.FirstDifference(got, want))
		}
	}
}
