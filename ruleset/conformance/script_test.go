package conformance

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestEveryScriptChecks checks that each world in the folder worlds has a name of its own and a
// check.
func TestEveryScriptChecks(t *testing.T) {
	t.Parallel()
	names := map[string]bool{}
	for _, w := range worldsOfSuite(t) {
		if names[w.name] {
			t.Errorf("two worlds are named %q", w.name)
		}
		names[w.name] = true
	}
	files := must.Get(fs.Glob(texts, "worlds/*"))(t)
	for _, file := range files {
		text := must.Get(fs.ReadFile(texts, file))(t)
		if _, worlds, ok := strings.Cut(string(text), "\nworld "); ok {
			for world := range strings.SplitSeq(worlds, "\nworld ") {
				if name, steps, _ := strings.Cut(world, "\n"); !strings.Contains(steps, " = ") && !strings.Contains(steps, "\nexpire ") && !strings.Contains(steps, "\nundisturbed ") {
					t.Errorf("%s: world %q has no check", file, name)
				}
			}
			continue
		}
		t.Errorf("%s has no world", file)
	}
}

// TestScriptErrorsNameTheLine reads scripts with one wrong word, in the last line.
func TestScriptErrorsNameTheLine(t *testing.T) {
	t.Parallel()
	const begin = "# Comment\nworld w\nset web cluster=1 # comment\n"
	for _, test := range []struct{ text, want string }{
		{"set web cluster=1", `a.txt:1: a script begins with "world NAME"`},
		{"world w", `a.txt: the world "w" has no steps`},
		{"world w\nneeds SCTP\n  sync", `a.txt:3: only steps have indented lines`},
		{"world w\nneeds color", `a.txt:2: there is no feature "color"`},
		{"world w\nwith windows=3", `a.txt:2: there is no setting "windows"`},
		{"world w\nwith local=sometimes", `a.txt:2: "sometimes" must be one of ["none" "clusterCIDR" "bridge" "prefix"]`},
		{"world w\nset web", `a.txt:2: the Service "web" needs cluster=NUMBER`},
		{"world w\nset web cluster=1 type=Magic", `a.txt:2: "Magic" must be one of ["ClusterIP" "NodePort" "LoadBalancer" "ExternalName"]`},
		{"world w\nset web cluster=1 color=red", `a.txt:2: a Service has no "color"`},
		{"world w\nset web cluster=1 ports=http", `a.txt:2: a port has the form [NAME@]PORT[:NODEPORT][>TARGET][/PROTOCOL], not "http"`},
		{"world w\nset web cluster=1 endpoints=pod1,pot2", `a.txt:2: there is no pod "pot2"`},
		{"world w\nset web cluster=1 endpoints=pod1/late", `a.txt:2: an endpoint has no "late"`},
		{begin + "change wib endpoints=pod1", `a.txt:4: there is no Service "wib"`},
		{begin + "remove wib", `a.txt:4: there is no Service "wib"`},
		{begin + "dance", `a.txt:4: no step "dance"`},
		{begin + "node color=red", `a.txt:4: "color=red" is not of the form zone=ZONE or address=ADDRESS`},
		{begin + "sync\n  dance", `a.txt:5: "dance" is no row: HOSTS -> TARGETS = RESULT`},
		{begin + "check", `a.txt:4: check has no rows`},
		{begin + "check if color: pod1 -> cluster1:80 = pod1", `a.txt:4: there is no feature "color"`},
		{begin + "check\n  pod1 -> cluster1:80 = drop\n  pod1 -> cluster1 = drop", `a.txt:6: "cluster1" is no target: ADDRESS:PORT`},
		{begin + "check\n  pod1 -> clister1:80 = drop", `a.txt:5: there is no address "clister1"`},
		{begin + "check\n  pod1 -> cluster1:80", `a.txt:5: "pod1 -> cluster1:80" is no row: HOSTS -> TARGETS = RESULT`},
		{begin + "check\n  pod1 -> TCP = drop", `a.txt:5: a target is missing`},
		{begin + "check\n  pod1 = drop", `a.txt:5: a target is missing`},
		{begin + "check client9 -> cluster1:80 = drop", `a.txt:4: there is no host "client9"`},
		{begin + "check pod1 -> cluster1:80 = pod1 dropped", `a.txt:4: "dropped" is no result: reject, drop, pass, or pods`},
		{begin + "check pod1 -> cluster1:80 = pod4*", `a.txt:4: there is no host "pod4"`},
		{begin + "change web endpoints=remote4", `a.txt:4: there is no host "remote4"`},
		{begin + "undisturbed TCP cluster1:80", `a.txt:4: undisturbed has no steps`},
		{begin + "undisturbed TCP cluster1:80\n  sync\n  dance", `a.txt:6: no step "dance"`},
	} {
		worlds, err := suite(fstest.MapFS{"a.txt": {Data: []byte(test.text + "\n")}}, false)
		if err != nil {
			if err.Error() != test.want {
				t.Errorf("%q\nreports %v\nwant    %s", test.text, err, test.want)
			}
			continue
		}
		// Steps are read when they run.
		where, what, _ := strings.Cut(test.want, ": ")
		s := must.Get(Simulation{New: simPlanes(false, "")}.complete())(t)
		out := complaints(t, func(tb testing.TB) { s.script(tb, worlds[len(worlds)-1], plain) })
		if !strings.Contains(out, what) || !strings.Contains(out, where+": ") {
			t.Errorf("%q\nreports %s\nwant    %s", test.text, out, test.want)
		}
	}
	if _, err := suite(fstest.MapFS{"a.text": {}}, false); err == nil {
		t.Error("a folder without scripts is accepted")
	}
}

// worldsOfSuite returns the worlds that need no connections.
func worldsOfSuite(t *testing.T) []world {
	t.Helper()
	worlds := must.Get(suite(nil, false))(t)
	return worlds
}

// TestScriptsOfAVendor runs scripts of a folder. A step that fails names its line.
func TestScriptsOfAVendor(t *testing.T) {
	t.Parallel()
	worlds, err := suite(fstest.MapFS{"own.txt": {Data: []byte(`
world our load balancer
needs source ranges
set web cluster=1 type=LoadBalancer ports=80:30080 lb=1 externalPolicy=Local endpoints=pod1,remote1
  client1 -> lb1:80 node:30080 = pod1
  pod3 -> TCP lb1:80 = pod1 remote1
change web sources=192.0.2.99/32,2001:db8:1::99/128
  everyone -> lb1:80 = drop
check if other ports: everyone -> lb1:81 = pass

world wrong
set web cluster=1 endpoints=pod1
check pod3 -> cluster1:80 = pod2
`)}}, false)
	if err != nil {
		t.Fatal(err)
	}
	s := must.Get(Simulation{New: simPlanes(false, "")}.complete())(t)
	worlds = worlds[len(worlds)-2:]
	s.script(t, worlds[0], plain)
	const want = "the world ends in own.txt:13: check pod3 -> cluster1:80 = pod2"
	if out := complaints(t, func(tb testing.TB) { s.script(tb, worlds[1], plain) }); !strings.Contains(out, want) {
		t.Errorf("the failure is %q, want %q", out, want)
	}
}
