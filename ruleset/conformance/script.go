package conformance

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
)

//go:embed worlds/*.txt
var texts embed.FS

// textWorlds returns the worlds of the folder worlds.
var textWorlds = sync.OnceValue(func() []world {
	dir, err := fs.Sub(texts, "worlds")
	if err != nil {
		panic(err)
	}
	out, err := withScripts(nil, dir)
	if err != nil {
		panic(err)
	}
	return out
})

// withScripts returns worlds, and those in the files *.txt of a folder unless it is nil.
func withScripts(worlds []world, dir fs.FS) ([]world, error) {
	if dir == nil {
		return worlds, nil
	}
	files, err := fs.Glob(dir, "*.txt")
	if err != nil || len(files) == 0 {
		return nil, errors.Join(errors.New("conformance: Scripts has no file *.txt"), err)
	}
	for _, file := range files {
		text, err := fs.ReadFile(dir, file)
		if err != nil {
			return nil, err
		}
		more, err := parseWorlds(file, string(text))
		if err != nil {
			return nil, err
		}
		worlds = slices.Concat(worlds, more)
	}
	return worlds, nil
}

// line is a line of text, with the indented lines below it.
type line struct {
	number int
	text   string
	below  []line
}

// linesOf returns the lines of a text without comments. The first one has the given number.
func linesOf(text string, number int) (out []line) {
	margin := 0
	for text := range strings.SplitSeq(text, "\n") {
		text, _, _ = strings.Cut(text, "#")
		indent := len(text) - len(strings.TrimLeft(text, " \t"))
		switch l := (line{number: number, text: strings.TrimSpace(text)}); {
		case l.text == "":
		case len(out) != 0 && indent > margin:
			last := &out[len(out)-1]
			last.below = append(last.below, l)
		default:
			out, margin = append(out, l), indent
		}
		number++
	}
	return out
}

// play is a world whose script runs.
type play struct {
	cluster
	clients map[client]netip.AddrPort
	held    func() error
}

// step is a step of a script.
type step struct {
	where string
	run   func(*play)
}

// runSteps runs steps. It reports the step with which a world ends early.
func runSteps(w cluster, steps []step) {
	p, at := &play{cluster: w}, ""
	defer func() {
		if at != "" {
			w.errorf("the world ends in %s", at)
		}
	}()
	for _, s := range steps {
		at = s.where
		s.run(p)
	}
	at = ""
}

// runScript runs the steps of a text in a world whose script is in Go.
func runScript(w cluster, text string) {
	_, file, number, _ := runtime.Caller(1)
	p := parser{file: file, words: map[string]bool{}}
	runSteps(w, p.steps(linesOf(text, number)))
}

// parser reads scripts. README.md of the folder worlds describes the language. Its methods panic with a
// syntaxError.
type parser struct {
	file string
	// number is that of the line that is being read.
	number int
	// world is the current world, and services has the names of its Services. They are nil in
	// runScript.
	world    *world
	services map[string]bool
	// words has the first words of the steps so far.
	words map[string]bool
}

// syntaxError is an error of a script.
type syntaxError string

func fail(format string, args ...any) { panic(syntaxError(fmt.Sprintf(format, args...))) }

// parseWorlds returns the worlds of a file.
func parseWorlds(file, text string) (out []world, err error) {
	p := parser{file: file}
	defer func() {
		if r := recover(); r != nil {
			reason, ok := r.(syntaxError)
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("%s:%d: %s", file, p.number, reason)
		}
	}()
	lines := linesOf(text, 1)
	for len(lines) != 0 {
		isWorld := func(l line) bool { return strings.HasPrefix(l.text, "world ") }
		n := 1 + slices.IndexFunc(append(lines[1:], line{text: "world "}), isWorld)
		out = append(out, p.parseWorld(lines[:n]))
		lines = lines[n:]
	}
	return out, nil
}

// parseWorld returns the world of some lines.
func (p *parser) parseWorld(lines []line) (w world) {
	p.world, p.services, p.words, p.number = &w, map[string]bool{}, map[string]bool{}, lines[0].number
	var ok bool
	if w.name, ok = strings.CutPrefix(lines[0].text, "world "); !ok {
		fail(`a script begins with "world NAME"`)
	}
	for lines = lines[1:]; len(lines) != 0; lines = lines[1:] {
		p.number = lines[0].number
		word, rest, _ := strings.Cut(lines[0].text, " ")
		if len(lines[0].below) != 0 && (word == "needs" || word == "with") {
			p.number = lines[0].below[0].number
			fail("only steps have indented lines")
		}
		switch word {
		case "needs":
			w.needs = parseFeatures(rest)
			w.config.sctp = slices.Contains(w.needs, SCTP)
		case "with":
			eachWord(rest, w.config.word)
		default:
			w.config = w.config.complete()
			steps := p.steps(lines)
			w.run = func(c cluster) { runSteps(c, steps) }
			return w
		}
	}
	fail("the world %q has no steps", w.name)
	return w
}

// steps returns the steps of some lines.
func (p *parser) steps(lines []line) (out []step) {
	add := func(l line, run func(*play)) {
		out = append(out, step{fmt.Sprintf("%s:%d: %s", p.file, l.number, l.text), run})
	}
	for _, l := range lines {
		p.number = l.number
		switch word, rest, _ := strings.Cut(l.text, " "); {
		case word == "check":
			add(l, p.check(l, rest))
		case word == "undisturbed":
			aims, steps := parseAims(rest), p.steps(l.below)
			if len(steps) == 0 {
				fail("undisturbed has no steps")
			}
			add(l, func(w *play) { w.undisturbed(w.targets(aims), func() { runSteps(w.cluster, steps) }) })
		default:
			add(l, p.step(l.text))
			if len(l.below) != 0 {
				add(l, p.check(l, ""))
			}
		}
	}
	return out
}

// plainSteps are the steps of one word.
var plainSteps = map[string]func(*play){
	"sync":   func(w *play) { w.Sync() },
	"resync": func(w *play) { w.resync() },
	"stop":   func(w *play) { w.detach() },
	"start":  func(w *play) { w.attach() },
	"restart": func(w *play) {
		if w.does(Restart) {
			w.detach()
			w.attach()
		}
	},
}

// step returns a step without rows.
func (p *parser) step(text string) func(*play) {
	if run := plainSteps[text]; run != nil {
		return run
	}
	word, rest, _ := strings.Cut(text, " ")
	p.words[word] = true
	if first := map[string]string{"same": "remember", "held": "hold"}[word]; first != "" && !p.words[first] {
		fail("%s needs a step %s before it", word, first)
	}
	switch word {
	case "set", "change", "remove":
		return p.service(word, rest)
	case "node":
		return parseNode(rest)
	case "serviceCIDRs":
		ranges := map[string][]netip.Prefix{"cidrs": nil, "inUse": nil}
		eachWord(rest, func(key, value string) {
			oneOf(key, "cidrs", "inUse")
			ranges[key] = list(value, parsePrefix)
		})
		return func(w *play) { w.setServiceCIDRs(ranges["cidrs"], ranges["inUse"]) }
	case "remember", "same":
		to, why, _ := strings.Cut(rest, "=")
		aims := parseAims(to)
		if len(aims) != 1 || len(aims[0].protocols) != 1 {
			fail("%s needs one protocol and one target", word)
		}
		return func(w *play) {
			now := w.chosen(aims[0].protocols[0], aims[0].to)
			if word == "same" {
				w.same(strings.TrimSpace(why), w.clients, now)
				return
			}
			w.clients = now
		}
	case "hold":
		aims := parseAims(rest)
		return func(w *play) { w.held = w.hold(w.targets(aims)) }
	case "held":
		return func(w *play) {
			if err := w.held(); err != nil {
				w.errorf("%s: %v", rest, err)
			}
		}
	}
	fail("no step %q", text)
	return nil
}

// service returns the step that sets, changes or removes a Service.
func (p *parser) service(word, text string) func(*play) {
	name, words, _ := strings.Cut(text, " ")
	s := service{name: name, kind: "ClusterIP", ports: parsePorts("80")}
	eachWord(words, s.word)
	for _, e := range s.endpoints {
		p.host(e.pod)
	}
	switch {
	case word == "set" && s.number == 0:
		fail("the Service %q needs cluster=NUMBER", name)
	case word != "set" && p.services != nil && !p.services[name]:
		fail("there is no Service %q", name)
	case word == "change":
		return func(w *play) { w.change(name, func(s *service) { eachWord(words, s.word) }) }
	case word == "remove":
		return func(w *play) { w.remove(name) }
	}
	if p.services != nil {
		p.services[name] = true
	}
	return func(w *play) { w.set(&s) }
}

// check returns the step that checks the rows of a line.
func (p *parser) check(l line, text string) func(*play) {
	var needs []Feature
	if rest, ok := strings.CutPrefix(text, "if "); ok {
		var names string
		names, text, _ = strings.Cut(rest, ":")
		needs = parseFeatures(names)
	}
	lines, to := l.below, text
	if strings.Contains(text, "=") {
		lines, to = slices.Insert(lines, 0, line{number: l.number, text: text}), ""
	}
	if len(lines) == 0 {
		fail("check has no rows")
	}
	var rows []row
	for _, l := range lines {
		p.number = l.number
		rows = append(rows, p.rows(l.text, to)...)
	}
	return func(w *play) {
		if w.lacks(needs) {
			w.check()
			return
		}
		w.check(rows...)
	}
}

// result matches a pod that a row expects.
var result = regexp.MustCompile(`^((?:pod|remote)[0-9]+)(:[0-9]+)?\*?$`)

// everyone lists one host of every kind. Of its pods, only pod1 is an endpoint in
// most worlds.
const everyone = "client1 remote3 pod1 pod3 node"

// rows returns the rows of a line. Without targets of its own it has those of its check.
func (p *parser) rows(text, to string) (out []row) {
	from, want, ok := strings.Cut(text, "=")
	from, own, _ := strings.Cut(from, "->")
	from, want = strings.TrimSpace(strings.ReplaceAll(from, "everyone", everyone)), strings.TrimSpace(want)
	if !ok || from == "" || want == "" {
		fail("%q is no row: HOSTS -> TARGETS = RESULT", text)
	}
	for name := range strings.FieldsSeq(from) {
		p.host(name)
	}
	if !slices.Contains([]string{"reject", "drop", "pass"}, want) {
		for name := range strings.FieldsSeq(want) {
			m := result.FindStringSubmatch(name)
			if m == nil {
				fail("%q is no result: reject, drop, pass, or pods", name)
			}
			p.host(m[1])
		}
	}
	for _, a := range parseAims(to + own) {
		for _, proto := range a.protocols {
			out = append(out, row{from: from, proto: proto, to: a.to, want: want})
		}
	}
	return out
}

// host fails if the world does not have a host.
func (p *parser) host(name string) {
	kind, n := numberOf(name)
	most := map[string]int{"client": maxNumber, "pod": localPods, remoteName: maxNumber}
	if p.world != nil {
		most["client"], most[remoteName] = p.world.config.clients, p.world.config.remotePods
	}
	if name != nodeName && name != "loopback" && (n < 1 || n > most[kind]) {
		fail("there is no host %q", name)
	}
}

func parseFeatures(text string) (out []Feature) {
	for name := range strings.SplitSeq(text, ",") {
		f := Feature(strings.TrimSpace(name))
		if !slices.Contains(features, f) {
			fail("there is no feature %q", f)
		}
		out = append(out, f)
	}
	return out
}
