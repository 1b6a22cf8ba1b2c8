package complaint

import (
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	// namespaceBurst and namespaceEvery are the number of messages about the objects of one
	// namespace that may follow each other, and the time in which another is allowed.
	namespaceBurst = 20
	namespaceEvery = 10 * time.Second
	// burst and every are the same for all namespaces together.
	burst = 200
	every = time.Second / 2
	// remembered is the number of messages, and of namespaces, that are remembered at least.
	// An hour after it was remembered, a message may be forgotten.
	remembered    = 4096
	rememberedFor = time.Hour
)

// Log writes messages about objects. Its methods are safe for concurrent use.
type Log struct {
	log *slog.Logger
	now func() time.Time

	mu         sync.Mutex
	seed       maphash.Seed
	seen       generations[uint64, struct{}]
	namespaces generations[string, *Bucket]
	all        Bucket
	suppressed int
}

// NewLog returns a Log that writes to log.
func NewLog(log *slog.Logger) *Log { return newLog(log, time.Now) }

func newLog(log *slog.Logger, now func() time.Time) *Log {
	return &Log{log: log, now: now, seed: maphash.MakeSeed(), all: Bucket{Burst: burst, Every: every}}
}

// Object is the object that a message is about.
type Object struct {
	// Kind is the attribute that holds the object's name, such as "service".
	Kind string
	// Namespace and Name are the name of the object.
	Namespace, Name string
	// UID distinguishes objects of the same name. It may be "".
	UID string

	part string // the whole name of a part of the object, or ""
}

// Port returns the object for a port of a Service. key is the whole name of the port.
func Port(namespace, name, key string) Object {
	return Object{Kind: "service", Namespace: namespace, Name: name, part: key}
}

// String returns the name of the object, or of its part, cut at 450 bytes.
func (o Object) String() string {
	switch {
	case o.part != "":
		return clip(o.part, maxPart)
	case o.Namespace != "":
		return Name(o.Namespace + "/" + o.Name)
	}
	return Name(o.Name)
}

// Write logs a message about an object, unless it is suppressed, and reports whether it did. A caller sends an event
// only then. The values of args that are strings, errors or implement [fmt.Stringer] are cut at 600 bytes; the caller
// cuts values from objects with [Value].
func (l *Log) Write(level slog.Level, o Object, message string, args ...any) bool {
	attrs := make([]slog.Attr, 0, 2+len(args)/2)
	attrs = append(attrs, slog.String(o.Kind, o.String()))
	for i := 0; i+1 < len(args); i += 2 {
		attrs = append(attrs, slog.Any(args[i].(string), bounded(args[i+1])))
	}
	skipped, ok := l.admit(o, message, attrs)
	if !ok {
		return false
	}
	if skipped > 0 {
		attrs = append(attrs, slog.Int("suppressed", skipped))
	}
	l.log.LogAttrs(context.Background(), level, message, attrs...)
	return true
}

// bounded returns v with its text cut. Numbers are kept.
func bounded(v any) any {
	switch v := v.(type) {
	case string:
		return Text(v)
	case error:
		return Text(v.Error())
	case fmt.Stringer:
		return Text(v.String())
	}
	return v
}

// admit reports whether a message is passed, and how many were suppressed since the last one
// that was. A repeated message does not count as suppressed.
func (l *Log) admit(o Object, message string, attrs []slog.Attr) (suppressed int, ok bool) {
	var h maphash.Hash
	l.mu.Lock()
	defer l.mu.Unlock()
	h.SetSeed(l.seed)
	for _, s := range []string{o.UID, o.Namespace, o.Name, message} {
		h.WriteString(s)
		h.WriteByte(0)
	}
	for _, a := range attrs {
		h.WriteString(a.Value.String())
		h.WriteByte(0)
	}
	now, id := l.now(), h.Sum64()
	if _, ok := l.seen.get(now, id); ok {
		return 0, false
	}
	b, ok := l.namespaces.get(now, o.Namespace)
	if !ok {
		b = &Bucket{Burst: namespaceBurst, Every: namespaceEvery}
		l.namespaces.put(strings.Clone(o.Namespace), b)
	}
	// Do not remember a message that is dropped for lack of tokens; it may be logged later.
	if !b.has(now) || !l.all.has(now) {
		l.suppressed++
		return 0, false
	}
	b.take()
	l.all.take()
	l.seen.put(id, struct{}{})
	suppressed, l.suppressed = l.suppressed, 0
	return suppressed, true
}

// generations is a map of bounded size: when the current generation is full or old, it becomes the previous one.
type generations[K comparable, V any] struct {
	current, previous map[K]V
	since             time.Time
}

// get returns the value of a key. It keeps the entry's generation, so that an entry expires
// even if it is in use.
func (g *generations[K, V]) get(now time.Time, k K) (V, bool) {
	if g.current == nil || len(g.current) >= remembered || now.Sub(g.since) > rememberedFor {
		g.previous, g.current, g.since = g.current, map[K]V{}, now
	}
	v, ok := g.current[k]
	if !ok {
		v, ok = g.previous[k]
	}
	return v, ok
}

// put adds an entry after get.
func (g *generations[K, V]) put(k K, v V) { g.current[k] = v }

const (
	maxValue = 100
	// The API allows 63 bytes for a namespace and 253 for a name.
	maxName = 317
	// A port adds its name, of 63 bytes, the protocol and the family.
	maxPart = 450
	maxLong = 4000
	maxText = 600
)

// Value returns a value from an object for use in a message, cut at 100 bytes.
func Value[S ~string](s S) S { return S(clip(string(s), maxValue)) }

// Name returns the name of an object for use in a message, cut at 317 bytes, the most that the
// API allows.
func Name(s string) string { return clip(s, maxName) }

// Text returns the text of a message, cut at 600 bytes.
func Text(s string) string { return clip(s, maxText) }

// Long returns a text about several objects for use in a message, cut at 4,000 bytes.
func Long(s string) string { return clip(s, maxLong) }

// clip returns s as [Printable] writes it, cut at most bytes and at the end of a character. A cut text
// ends with the number of bytes that are missing.
func clip(s string, most int) string {
	for cut := min(len(s), most); ; cut /= 2 {
		for cut > 0 && cut < len(s) && !utf8.RuneStart(s[cut]) {
			cut--
		}
		switch text := Printable(s[:cut]); {
		case len(text) > most:
		case cut == len(s):
			return text
		default:
			return fmt.Sprintf("%s... (%d more bytes)", text, len(s)-cut)
		}
	}
}

// Printable returns s with the escape sequences of Go in place of everything that cannot be printed, and U+FFFD in
// place of invalid UTF-8: one line that cannot end the comment of a script, forge a line of a log, or control a
// terminal. [Value], [Name], [Text] and [Long] call it.
func Printable(s string) string {
	odd := func(r rune) bool { return r == utf8.RuneError || !strconv.IsPrint(r) }
	if !strings.ContainsFunc(s, odd) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if strconv.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
	}
	return b.String()
}

// Bucket is a token bucket, full at first. It is not safe for concurrent use.
type Bucket struct {
	// Burst is the number of events in a row that the bucket allows. It must be positive.
	Burst int
	// Every is the time in which it allows another one. It must be positive.
	Every time.Duration

	used    int
	at      time.Time // when used was last correct
	refused int
}

// Take reports whether an event is allowed. If so, suppressed is the number of events since
// the last allowed one that were not.
func (b *Bucket) Take(now time.Time) (suppressed int, ok bool) {
	if !b.has(now) {
		b.refused++
		return 0, false
	}
	b.take()
	suppressed, b.refused = b.refused, 0
	return suppressed, true
}

func (b *Bucket) has(now time.Time) bool {
	if n := int64(now.Sub(b.at) / b.Every); n >= int64(b.used) {
		b.used, b.at = 0, now
	} else if n > 0 {
		b.used -= int(n)
		b.at = b.at.Add(time.Duration(n) * b.Every)
	}
	return b.used < b.Burst
}

// take takes a token that has reported.
func (b *Bucket) take() { b.used++ }
