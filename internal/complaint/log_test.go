package complaint

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// fake is a Log with its output and clock.
func fake() (l *Log, out *bytes.Buffer, now *time.Time) {
	out, now = &bytes.Buffer{}, new(time.Time)
	*now = time.Unix(1e9, 0)
	return newLog(slog.New(slog.NewTextHandler(out, nil)), func() time.Time { return *now }), out, now
}

func TestSameMessageIsWrittenOnce(t *testing.T) {
	l, out, now := fake()
	o := Object{Kind: "service", Namespace: "ns", Name: "a", UID: "1"}
	for range 100 {
		l.Write(slog.LevelWarn, o, "bad", "err", "x")
		*now = now.Add(time.Second)
	}
	if n := strings.Count(out.String(), "\n"); n != 1 {
		t.Errorf("%d lines:\n%s", n, out)
	}
	for _, other := range []func() bool{
		func() bool { return l.Write(slog.LevelWarn, o, "bad", "err", "y") },
		func() bool {
			return l.Write(slog.LevelWarn, Object{Kind: "service", Namespace: "ns", Name: "a", UID: "2"}, "bad", "err", "x")
		},
		func() bool {
			return l.Write(slog.LevelWarn, Object{Kind: "service", Namespace: "ns", Name: "b", UID: "1"}, "bad", "err", "x")
		},
	} {
		if !other() {
			t.Error("another message was suppressed")
		}
	}
	*now = now.Add(2*rememberedFor + time.Second)
	l.Write(slog.LevelWarn, o, "old", "err", "x") // starts another generation
	*now = now.Add(2*rememberedFor + time.Second)
	if !l.Write(slog.LevelWarn, o, "bad", "err", "x") {
		t.Error("the message was suppressed hours later")
	}
}

func TestRateIsBoundedByNamespaceAndInAll(t *testing.T) {
	l, out, now := fake()
	write := func(ns string, n int) (written int) {
		for i := range n {
			if l.Write(slog.LevelWarn, Object{Kind: "service", Namespace: ns, Name: fmt.Sprint(i)}, "bad", "at", now.UnixNano()) {
				written++
			}
		}
		return written
	}
	if n := write("attacker", 1000); n != namespaceBurst {
		t.Errorf("%d messages of one namespace", n)
	}
	if n := write("victim", 3); n != 3 {
		t.Errorf("%d of 3 messages of another namespace", n)
	}
	if !strings.Contains(out.String(), fmt.Sprintf("suppressed=%d", 1000-namespaceBurst)) {
		t.Error("the number of suppressed messages is missing")
	}
	*now = now.Add(namespaceEvery)
	if n := write("attacker", 1000); n != 1 {
		t.Errorf("%d messages after the time for one", n)
	}
	*now = now.Add(time.Hour)
	n := 0
	for i := range 1000 {
		n += write(fmt.Sprint("ns", i), 3)
	}
	if n != burst {
		t.Errorf("%d messages of all namespaces", n)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	l, _, now := fake()
	for i := range 5 * remembered {
		*now = now.Add(every)
		l.Write(slog.LevelWarn, Object{Kind: "service", Namespace: fmt.Sprint(i), Name: "a"}, "bad")
	}
	if n := len(l.seen.current) + len(l.seen.previous); n > 2*remembered {
		t.Errorf("%d messages are remembered", n)
	}
	if n := len(l.namespaces.current) + len(l.namespaces.previous); n > 2*remembered {
		t.Errorf("%d namespaces are remembered", n)
	}
}

// maxRecord bounds a record: a name, a part, two texts and what the handler adds. Quoting makes
// four bytes of one that cannot be printed.
const maxRecord = 4*(450+2*600) + 400

func FuzzRecordsAreBounded(f *testing.F) {
	f.Add("ns", "name", "p", strings.Repeat("x", 1<<18), strings.Repeat("\xff\x1b", 1<<10))
	f.Add(strings.Repeat("n", 1<<16), strings.Repeat("日", 1<<16), strings.Repeat("\n", 1<<10), "", "\"")
	f.Fuzz(func(t *testing.T, namespace, name, part, a, b string) {
		l, out, _ := fake()
		if !l.Write(slog.LevelWarn, Object{Kind: "service", Namespace: namespace, Name: name, part: part, UID: "uid"}, "message", "a", a, "err", fmt.Errorf("%q", b)) {
			t.Fatal("suppressed")
		}
		if out.Len() > maxRecord {
			t.Errorf("%d bytes", out.Len())
		}
		if strings.Count(out.String(), "\n") != 1 {
			t.Errorf("more than one line: %q", out)
		}
		if v := Value(a); len(v) > 140 || utf8.ValidString(a) && !utf8.ValidString(v) {
			t.Errorf("cut to %q", v)
		}
	})
}

func TestPrintableIsOneHarmlessLine(t *testing.T) {
	for in, want := range map[string]string{
		"ns/web:p":                 "ns/web:p",
		`node "x", zürich`:         `node "x", zürich`,
		"a\x1b[31m\nX\u202e\a\x00": `a\x1b[31m\nX\u202e\a\x00`,
		"\xff":                     "\ufffd",
		"a\xffb\n":                 "a\ufffdb\\n",
	} {
		if got := Printable(in); got != want {
			t.Errorf("Printable(%q) = %q, want %q", in, got, want)
		}
	}
}
