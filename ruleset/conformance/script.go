package conformance

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

//go:embed worlds/*.txt
var texts embed.FS

// world is a world of the suite: a script. README.md of the folder worlds describes the language.
type world struct {
	name string
	// needs lists the features that the world requires. packets tells that it also requires connections.
	needs   []Feature
	packets bool
	config  config
	file    string
	steps   []line
}

// line is a line of a script, with the lines below it that are indented more.
type line struct {
	number, indent int
	text           string
	below          []line
}

// suite returns the worlds of the suite, and those in the files *.txt of a folder unless it is nil. It leaves out
// those that need connections unless packets is set, and otherwise returns them first, because they wait.
func suite(own fs.FS, packets bool) (out []world, err error) {
	folder, err := fs.Sub(texts, "worlds")
	if err != nil {
		return nil, err
	}
	for _, dir := range []fs.FS{folder, own} {
		if dir == nil {
			continue
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
			if out, err = parseWorlds(out, file, string(text)); err != nil {
				return nil, err
			}
		}
	}
	if !packets {
		return slices.DeleteFunc(out, func(w world) bool { return w.packets }), nil
	}
	slices.SortStableFunc(out, func(a, b world) int {
		if a.packets == b.packets {
			return 0
		} else if a.packets {
			return -1
		}
		return 1
	})
	return out, nil
}

func eachWorld(t *testing.T, worlds []world, skip skips, f func(*testing.T, world)) {
	for _, world := range worlds {
		t.Run(world.name, func(t *testing.T) {
			for _, f := range world.needs {
				if why, ok := skip[f]; ok {
					t.Skipf("the backend does not support %s: %s", f, why)
				}
			}
			f(t, world)
		})
	}
}

// parseWorlds appends the worlds of a file. It does not look at their steps.
func parseWorlds(out []world, file, text string) ([]world, error) {
	var w *world
	for _, l := range linesOf(text) {
		word, rest, _ := strings.Cut(l.text, " ")
		var err error
		switch {
		case word == "world":
			out = append(out, world{name: rest, file: file})
			w = &out[len(out)-1]
		case w == nil:
			err = errors.New(`a script begins with "world NAME"`)
		case w.steps != nil, word != "needs" && word != "with":
			w.steps = append(w.steps, l)
		case len(l.below) != 0:
			l.number, err = l.below[0].number, errors.New("only steps have indented lines")
		case word == "needs":
			rest, w.packets = strings.CutSuffix(rest, "packets")
			w.needs, err = parseFeatures(strings.TrimSuffix(rest, ", "))
			w.config.sctp = slices.Contains(w.needs, SCTP)
		default:
			err = w.config.parse(rest)
		}
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, l.number, err)
		}
	}
	for _, w := range out {
		if len(w.steps) == 0 {
			return nil, fmt.Errorf("%s: the world %q has no steps", w.file, w.name)
		}
	}
	return out, nil
}

func linesOf(text string) []line {
	var flat []line
	number := 0
	for text := range strings.SplitSeq(text, "\n") {
		number++
		text, _, _ = strings.Cut(text, "#")
		if rest := strings.TrimLeft(text, " \t"); rest != "" {
			flat = append(flat, line{number: number, indent: len(text) - len(rest), text: strings.TrimSpace(rest)})
		}
	}
	return nest(flat)
}

func nest(flat []line) (out []line) {
	for len(flat) != 0 {
		n := 1
		for n < len(flat) && flat[n].indent > flat[0].indent {
			n++
		}
		flat[0].below = nest(flat[1:n])
		out, flat = append(out, flat[0]), flat[n:]
	}
	return out
}

func parseFeatures(text string) (out []Feature, err error) {
	for name := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' }) {
		f := Feature(strings.TrimSpace(name))
		if !slices.Contains(features, f) {
			return nil, fmt.Errorf("there is no feature %q", f)
		}
		out = append(out, f)
	}
	return out, nil
}

func (c *config) parse(text string) error {
	words, err := parseWords(text)
	for key, value := range words {
		switch key {
		case "clients":
			c.clients, err = number(value)
		case "remotePods":
			c.remotePods, err = number(value)
		case "masqueradeAll":
			c.masqueradeAll, err = yes(value)
		case "nodePortAddresses":
			c.nodePortAddresses = list(value)
		case "bound":
			c.bound = list(value)
			_, err = addresses("", value, []tracker.Family{tracker.IPv4})
		case "local":
			_, err = oneOf(value, "none", "clusterCIDR", "bridge", "prefix")
			local := map[string]ruleset.LocalTraffic{
				"clusterCIDR": {CIDRs: each([]tracker.Family{tracker.IPv4, tracker.IPv6}, allPodsCIDR)},
				"bridge":      {Bridge: bridgeName}, "prefix": {InterfacePrefix: interfacePrefix},
			}[value]
			c.localTraffic, c.bridge = &local, value == "bridge"
		default:
			err = fmt.Errorf("there is no setting %q", key)
		}
		if err != nil {
			return err
		}
	}
	return err
}

// play is a world whose steps run.
type play struct {
	*World
	file string
	// values are those of let, and blocks those of steps.
	values map[string]string
	blocks map[string][]line
}

func (w world) run(on *World) {
	on.tb.Helper()
	s := &play{World: on, file: w.file, values: map[string]string{"everyone": everyone}, blocks: map[string][]line{}}
	s.run(w.steps)
}

// run runs steps. It reports the step with which a world ends early.
func (s *play) run(steps []line) {
	s.tb.Helper()
	at := ""
	defer func() {
		if at != "" {
			s.tb.Errorf("the world ends in %s", at)
		}
	}()
	for _, l := range steps {
		at = fmt.Sprintf("%s:%d: %s", s.file, l.number, l.text)
		if err := s.line(l); err != nil {
			s.tb.Fatal(err)
		}
	}
	at = ""
}

// everyone lists one host of every kind. Of its pods, only pod1 is an endpoint in most worlds.
const everyone = "client1 remote3 pod1 pod3 node"

var (
	variable = regexp.MustCompile(`\$\w+|\beveryone\b`)
	several  = regexp.MustCompile(`(.)\b([a-z]+)(\d+)\.\.(\d+)`)
)

// expand replaces the values of let, and ranges of names such as pod1..3 by the names.
func (s *play) expand(text string) string {
	text = variable.ReplaceAllStringFunc(text, func(name string) string { return s.values[strings.TrimPrefix(name, "$")] })
	return several.ReplaceAllStringFunc(text, func(part string) string {
		m := several.FindStringSubmatch(part)
		first, _ := number(m[3])
		last, _ := number(m[4])
		var names []string
		for n := first; n <= min(last, maxNumber); n++ {
			names = append(names, fmt.Sprint(m[2], n))
		}
		if m[1] == " " {
			return " " + strings.Join(names, " ")
		}
		return m[1] + strings.Join(names, ",")
	})
}

// line runs the steps of a line, of which the last one has the lines below.
func (s *play) line(l line) error {
	s.tb.Helper()
	steps := strings.Split(s.expand(l.text), ";")
	for i, text := range steps {
		below := l.below
		if i != len(steps)-1 {
			below = nil
		}
		word, rest, _ := strings.Cut(strings.TrimSpace(text), " ")
		if err := s.do(word, rest, below); err != nil {
			return err
		}
	}
	return nil
}

func (s *play) do(word, rest string, below []line) error {
	s.tb.Helper()
	if needs, then, ok := strings.Cut(rest, ":"); ok && strings.HasPrefix(needs, "if ") {
		features, err := parseFeatures(needs[len("if "):])
		if err != nil {
			return err
		}
		for _, f := range features {
			if why, lacks := s.skips[f]; lacks {
				s.tb.Logf("not checked: the backend does not support %s: %s", f, why)
				s.Sync()
				return nil
			}
		}
		rest = strings.TrimSpace(then)
	}
	name, words, _ := strings.Cut(rest, " ")
	var err error
	switch word {
	case "sync":
		s.Sync()
	case "resync":
		s.Cursor.Resync()
	case "stop":
		s.Cursor.Detach()
	case "start":
		s.attach()
	case "restart":
		if s.does(Restart) {
			s.Cursor.Detach()
			s.attach()
		}
	case "set", "change", "remove":
		err = s.service(word, name, words)
	case "node":
		err = s.setNode(rest)
	case "serviceCIDRs":
		err = s.setServiceCIDRs(rest)
	case "let":
		if name, value, ok := strings.Cut(rest, " = "); ok {
			s.values[name] = value
			return nil
		}
		s.blocks[rest] = below
		return nil
	case "do":
		if s.blocks[rest] == nil {
			return fmt.Errorf("there is no %q of steps", rest)
		}
		s.run(s.blocks[rest])
	case "check":
		return s.check(rest, below)
	case "repeat":
		return s.repeat(rest, below)
	default:
		return s.step(s, word, rest, below)
	}
	if err != nil || len(below) == 0 {
		return err
	}
	return s.check("", below)
}

func (s *play) service(word, name, text string) error {
	words, err := parseWords(text)
	if err != nil {
		return err
	}
	if old := s.services[name]; word != "set" {
		if old == nil {
			return fmt.Errorf("there is no Service %q", name)
		}
		old = maps.Clone(old)
		maps.Copy(old, words)
		words = old
	}
	for _, pod := range result.FindAllString(words["endpoints"], -1) {
		if err := s.host(pod); err != nil {
			return err
		}
	}
	o, slices, err := objects(name, words, s.Env.Families)
	if err != nil {
		return err
	}
	s.services[name] = words
	set := func(op worldgen.Op, deletion worldgen.Op) {
		if word == "remove" {
			op = deletion
		}
		s.apply(op)
	}
	id := func(name string) *types.NamespacedName {
		return &types.NamespacedName{Namespace: namespace, Name: name}
	}
	set(worldgen.Op{SetService: o}, worldgen.Op{DeleteService: id(name)})
	for _, slice := range slices {
		set(worldgen.Op{SetSlice: slice}, worldgen.Op{DeleteSlice: id(slice.Name)})
	}
	if word == "remove" {
		delete(s.services, name)
	}
	return nil
}

func (s *play) setNode(text string) error {
	key, value, _ := strings.Cut(text, "=")
	n := s.Tracker.Node()
	switch _, ok := named(value, tracker.IPv4); {
	case key == "zone":
		n.Zone = value
	case key == "address" && ok:
		n.Addresses = each(s.Env.Families, func(f tracker.Family) netip.Addr { return address(value, f) })
	default:
		return fmt.Errorf("%q is not of the form zone=ZONE or address=ADDRESS", text)
	}
	s.apply(worldgen.Op{SetNode: &n})
	return nil
}

func (s *play) setServiceCIDRs(text string) error {
	words, err := parseWords(text)
	if err == nil {
		s.cidrs, err = parsePrefixes(words["cidrs"])
	}
	if err == nil {
		s.inUse, err = parsePrefixes(words["inUse"])
	}
	s.Engine.SetServiceCIDRs(s.cidrs, s.inUse)
	return err
}

// repeat runs the steps below for a number of times and at least some seconds.
func (s *play) repeat(text string, below []line) error {
	var times, seconds int
	if n, err := fmt.Sscan(text, &times, &seconds); n != 2 {
		return fmt.Errorf("repeat needs a number and seconds: %w", err)
	}
	start := time.Now()
	for i := 0; i < times || time.Since(start) < time.Duration(seconds)*time.Second; i++ {
		s.run(below)
	}
	return nil
}

// aim is a target of a script in one protocol.
type aim struct {
	proto v1.Protocol
	// family is the only one, unless it is 0.
	family  tracker.Family
	address string
	port    int
	// result is the port of the pods in results, ":PORT" unless it is podPort.
	result string
}

// at returns the target in a family, or the zero AddrPort if the family lacks it.
func (a aim) at(f tracker.Family) netip.AddrPort {
	if ip := address(a.address, f); ip.IsValid() && (a.family == 0 || a.family == f) {
		return netip.AddrPortFrom(ip, uint16(a.port))
	}
	return netip.AddrPort{}
}

func (a aim) String() string { return fmt.Sprintf("%s %s:%d", a.proto, a.address, a.port) }

// parseAims returns targets. A protocol, a family or >PORT of the pods holds for those behind it, >PORT up to the
// next protocol.
func parseAims(text string) (out []aim, err error) {
	protocols := []v1.Protocol{tcp, udp}
	var a aim
	for word := range strings.FieldsSeq(text) {
		switch word {
		case "TCP", "UDP", "SCTP":
			protocols, a = []v1.Protocol{v1.Protocol(word)}, aim{family: a.family}
		case "IPv4":
			a.family = tracker.IPv4
		case "IPv6":
			a.family = tracker.IPv6
		default:
			if port, ok := strings.CutPrefix(word, ">"); ok {
				a.result = ":" + port
				continue
			}
			name, port, ok := strings.Cut(word, ":")
			if !ok {
				return nil, fmt.Errorf("%q is no target: ADDRESS:PORT", word)
			}
			if _, ok := named(name, tracker.IPv4); !ok {
				return nil, fmt.Errorf("there is no address %q", name)
			}
			if a.port, err = number(port); err != nil {
				return nil, err
			}
			a.address = name
			for _, a.proto = range protocols {
				out = append(out, a)
			}
		}
	}
	if len(out) == 0 {
		return nil, errors.New("a target is missing")
	}
	return out, nil
}

// check syncs, and judges the connections of the rows of a line. If one fails, the world ends, because
// later failures would mostly be the same.
func (s *play) check(text string, below []line) error {
	s.tb.Helper()
	to := text
	if strings.Contains(text, "=") {
		below, to = slices.Insert(slices.Clone(below), 0, line{text: text}), ""
	}
	if len(below) == 0 {
		return errors.New("check has no rows")
	}
	var probes []probe
	for _, l := range below {
		err := s.row(&probes, s.expand(l.text), s.expand(to))
		if err != nil {
			return fmt.Errorf("%s:%d: %w", s.file, l.number, err)
		}
	}
	s.Sync()
	compare := s.count()
	if _, err := s.judgeAll(probes); err != nil {
		return err
	}
	return compare()
}

var result = regexp.MustCompile(`\b((?:pod|remote)\d+)(:\d+)?`)

// row appends the connections of a row. Without targets of its own it has those of its check.
func (s *play) row(out *[]probe, text, to string) error {
	from, want, ok := strings.Cut(text, "=")
	from, own, _ := strings.Cut(from, "->")
	if want = strings.TrimSpace(want); !ok || strings.TrimSpace(from) == "" || want == "" {
		return fmt.Errorf("%q is no row: HOSTS -> TARGETS = RESULT", text)
	}
	if strings.TrimSpace(own) != "" {
		to = own
	}
	aims, err := parseAims(to)
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(from) {
		if err := s.host(name); err != nil {
			return err
		}
	}
	if !slices.Contains([]string{"reject", "drop", "pass"}, want) {
		for name := range strings.FieldsSeq(want) {
			m := result.FindString(name)
			if m == "" || strings.TrimSuffix(name, "*") != m {
				return fmt.Errorf("%q is no result: reject, drop, pass, or pods", name)
			}
			pod, _, _ := strings.Cut(m, ":")
			if err := s.host(pod); err != nil {
				return err
			}
		}
	}
	for name := range strings.FieldsSeq(from) {
		for _, a := range aims {
			want := want
			if a.result != "" {
				want = result.ReplaceAllString(want, "$1"+a.result)
			}
			for _, f := range s.Env.Families {
				if to := a.at(f); to.IsValid() {
					*out = append(*out, probe{name, a.proto, to, want})
				}
			}
		}
	}
	return nil
}

func (w *World) host(name string) error {
	kind, n := numberOf(name)
	if name == nodeName || name == "loopback" || kind == "client" && n > 0 && n <= w.config.clients || slices.Contains(w.pods, name) {
		return nil
	}
	return fmt.Errorf("there is no host %q", name)
}
