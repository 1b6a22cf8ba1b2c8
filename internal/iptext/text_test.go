package iptext

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestQuotedWordsAreNotSplit(t *testing.T) {
	for line, want := range map[string]string{
		`-A X -j Y`: "-A|X|-j|Y",
		`-A X -m comment --comment "a \"b\" c" ! -s 10.0.0.0/8  -j Y`: `-A|X|-m|comment|--comment|a "b" c|!|-s|10.0.0.0/8|-j|Y`,
		`-A X --comment "" -j Y`: "-A|X|--comment||-j|Y",
		`"`:                      "",
	} {
		if got := strings.Join(splitWords(line), "|"); got != want {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
}

func TestTargetOfRule(t *testing.T) {
	for rule, want := range map[string]string{
		`-j KUBE-SERVICES`: "KUBE-SERVICES",
		`-m comment --comment "a -j b" -j REJECT --reject-with x`: "REJECT",
		`-d 10.0.0.0/8 -g KUBE-SVC-IP-0A/8`:                       "KUBE-SVC-IP-0A/8",
		`-m comment --comment "none"`:                             "",
		`-j`:                                                      "",
		``:                                                        "",
	} {
		if got := Target(rule); got != want {
			t.Errorf("%s: %q, want %q", rule, got, want)
		}
		if got := Target([]byte(rule)); got != want {
			t.Errorf("%s as bytes: %q, want %q", rule, got, want)
		}
	}
}

func TestRuleIsParsed(t *testing.T) {
	for text, want := range map[string]string{
		`! -s 10.0.0.0/8 -m comment --comment "-j a" -m tcp --dport 80 -g X`:  `{[{-s 10.0.0.0/8 true} {--dport 80 false}] -j a X true []}`,
		`-m set --match-set KUBE-IPS dst,dst -j SET --map-set A b --map-mark`: `{[{--match-set KUBE-IPS dst,dst false}]  SET false [{--map-set A b false} {--map-mark  false}]}`,
		`-m recent --set --name N --rsource -j DNAT --to-destination [::1]:1`: `{[{--set  false} {--name N false} {--rsource  false}]  DNAT false [{--to-destination [::1]:1 false}]}`,
		``: `{[]   false []}`,
	} {
		if got := fmt.Sprint(ParseRule(text)); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	if got := ParseRule("-j DNAT --to-destination 10.0.0.1:80").Option("--to-destination"); got != "10.0.0.1:80" {
		t.Errorf("option of the target: %q", got)
	}
}

func TestSavedTablesAreParsed(t *testing.T) {
	got := Parse("# saved\n*nat\n:OUTPUT ACCEPT [3:4]\n:EMPTY - [0:0]\n[1:2] -A OUTPUT -j EMPTY\n-A OUTPUT -m nfacct --nfacct-name  x\nnonsense\nCOMMIT\n*filter\n:EMPTY - [0:0]\nCOMMIT\n")
	want := Saved{"nat": {"OUTPUT": {"-j EMPTY", "-m nfacct --nfacct-name x"}, "EMPTY": nil}, "filter": {"EMPTY": nil}}
	if !maps.EqualFunc(got, want, func(a, b map[string][]string) bool { return maps.EqualFunc(a, b, slices.Equal) }) {
		t.Errorf("%v, want %v", got, want)
	}
	var counters []string
	Scan(strings.NewReader("*nat\n[1:2] -A OUTPUT -j X\n-A OUTPUT -j Y\n"), func(l Line) { counters = append(counters, string(l.Counters)) })
	if !slices.Equal(counters, []string{"[1:2]", ""}) {
		t.Errorf("counters %q", counters)
	}
}

func TestInputHasOneLineForEachCall(t *testing.T) {
	var in Input
	if !in.Empty() {
		t.Error("the zero value is not empty")
	}
	in.Begin("nat")
	in.Chain("A")
	in.Append("A", "-j B")
	in.Insert("OUTPUT", "-j A")
	in.Delete("OUTPUT", "-j C")
	in.Expect("OUTPUT", "-j A")
	in.Command(DeleteCommand("OUTPUT", "-j D"))
	in.Remove("C")
	in.Commit()
	want := "*nat\n:A - [0:0]\n-A A -j B\n-I OUTPUT 1 -j A\n-D OUTPUT -j C\n-C OUTPUT -j A\n-D OUTPUT -j D\n-X C\nCOMMIT\n"
	if in.String() != want || string(in.Bytes()) != want || in.Empty() {
		t.Errorf("%s\nwant\n%s", in.String(), want)
	}
}

func TestCommentCannotEndItsRule(t *testing.T) {
	for text, want := range map[string]string{
		"ns/svc:p cluster IP": `-m comment --comment "ns/svc:p cluster IP"`,
		"a\" -j ACCEPT\n-P":   `-m comment --comment "a? -j ACCEPT?-P"`,
		`\$(x)` + "`":         `-m comment --comment "??(x)?"`,
	} {
		if got := Comment(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	if got := Comment(strings.Repeat("x", 300), "y"); len(got) != len(Comment())+maxComment {
		t.Errorf("a comment of %d bytes", len(got)-len(Comment()))
	}
}

func TestPodMatches(t *testing.T) {
	const longest = "a23456789012345"
	for _, c := range []struct {
		local ruleset.LocalTraffic
		want  []string
	}{
		{ruleset.LocalTraffic{}, nil},
		{ruleset.LocalTraffic{Bridge: "cni0"}, []string{"-i cni0"}},
		{ruleset.LocalTraffic{InterfacePrefix: "veth"}, []string{"-i veth+"}},
		{ruleset.LocalTraffic{InterfacePrefix: longest}, []string{"-i " + longest}},
		{ruleset.LocalTraffic{CIDRs: []netip.Prefix{
			netip.MustParsePrefix("10.244.1.1/16"), netip.MustParsePrefix("fd00::/64"), netip.MustParsePrefix("10.9.0.0/16"),
		}}, []string{"-s 10.244.0.0/16", "-s 10.9.0.0/16"}},
	} {
		if got, err := PodMatches(c.local, tracker.IPv4); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, %v, want %q", c.local, got, err, c.want)
		}
	}
	for _, name := range []string{"a b", "x\ny", "cni0/", "-j", longest + "6", "veth+", `a"b`, `a\b`, "!a", "\xff"} {
		for _, l := range []ruleset.LocalTraffic{{Bridge: name}, {InterfacePrefix: name}} {
			if got, err := PodMatches(l, tracker.IPv4); err == nil {
				t.Errorf("%+v: %q", l, got)
			}
		}
	}
}
