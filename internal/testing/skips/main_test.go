package main

import (
	"strings"
	"testing"
)

func TestSkippedTestsAreListedByReason(t *testing.T) {
	const events = `{"Action":"start","Package":"example.com/nf"}
{"Action":"output","Package":"example.com/nf","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"example.com/nf","Test":"TestA","Output":"    rig_test.go:12: needs the nft tool\n"}
{"Action":"output","Package":"example.com/nf","Test":"TestA","Output":"--- SKIP: TestA (0.00s)\n"}
{"Action":"skip","Package":"example.com/nf","Test":"TestA"}
{"Action":"output","Package":"example.com/nf","Test":"TestB/sub","Output":"    rig_test.go:12: needs the nft tool\n"}
{"Action":"skip","Package":"example.com/nf","Test":"TestB/sub"}
{"Action":"output","Package":"example.com/nf","Test":"TestC","Output":"    c_test.go:1: the backend does not support a hash: iptables has none\n"}
{"Action":"skip","Package":"example.com/nf","Test":"TestC"}
{"Action":"output","Package":"example.com/nf","Test":"TestB","Output":"a log line\n"}
{"Action":"pass","Package":"example.com/nf","Test":"TestB"}
{"Action":"output","Package":"example.com/nf","Output":"PASS\n"}
{"Action":"output","Package":"example.com/nf","Output":"ok  \texample.com/nf\t0.01s\n"}
{"Action":"pass","Package":"example.com/nf"}
`
	var out strings.Builder
	failed, err := summarize(strings.NewReader(events), &out, 0)
	if failed || err != nil {
		t.Errorf("failed %v, %v", failed, err)
	}
	const want = "ok  \texample.com/nf\t0.01s\n\nskipped:\n  needs the nft tool: 2, such as nf.TestA\n      apt install nftables\n" +
		"  the backend does not support a hash: iptables has none: 1, such as nf.TestC\n\ntests: 0 ran, 3 skipped\n"
	if out.String() != want {
		t.Errorf("summary:\n%s\nwant:\n%s", out.String(), want)
	}
}

func TestFailuresAreShown(t *testing.T) {
	const events = `not JSON
{"ImportPath":"p [p.test]","Action":"build-output","Output":"p.go:1: undefined\n"}
{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:1: wrong\n"}
{"Action":"fail","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t0.1s\n"}
{"Action":"fail","Package":"p"}
`
	var out strings.Builder
	failed, err := summarize(strings.NewReader(events), &out, 0)
	if !failed || err != nil {
		t.Errorf("failed %v, %v", failed, err)
	}
	if want := "not JSON\np.go:1: undefined\n    c_test.go:1: wrong\nFAIL\tp\t0.1s\n\ntests: 1 ran, 0 skipped\n"; out.String() != want {
		t.Errorf("summary:\n%s\nwant:\n%s", out.String(), want)
	}
}

func TestTooManySkippedTestsAreAFailure(t *testing.T) {
	const events = `{"Action":"skip","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Test":"TestB/one"}
{"Action":"skip","Package":"p","Test":"TestB/two"}
{"Action":"pass","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p"}
`
	for percent, want := range map[int]bool{33: false, 34: true} {
		var out strings.Builder
		failed, err := summarize(strings.NewReader(events), &out, percent)
		if failed != want || err != nil || !strings.Contains(out.String(), "\ntests: 1 ran, 2 skipped\n") {
			t.Errorf("%d%% required: failed %v, %v:\n%s", percent, failed, err, out.String())
		}
	}
}
