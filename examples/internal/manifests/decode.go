package manifests

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Kind is the kind of an [Object].
type Kind string

// The kinds that a Reader reads.
const (
	Service       Kind = "Service"
	EndpointSlice Kind = "EndpointSlice"
	Node          Kind = "Node"
	ServiceCIDR   Kind = "ServiceCIDR"
)

// ErrNotUsed is the reason of a [Problem] for a valid object of a kind that a Reader does
// not read.
var ErrNotUsed = errors.New("is not used here")

// typeMeta is the part of an object that holds its type.
type typeMeta struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

func (t typeMeta) String() string {
	if t.APIVersion == "" {
		return t.Kind
	}
	return t.APIVersion + " " + t.Kind
}

// isList reports whether t is the type of a list.
func (t typeMeta) isList() bool { return strings.HasSuffix(t.Kind, "List") }

// item returns the type of the list's items, for items without their own type. It returns
// the zero value for a plain List.
func (t typeMeta) item() typeMeta {
	if t.Kind == "List" {
		return typeMeta{}
	}
	return typeMeta{APIVersion: t.APIVersion, Kind: strings.TrimSuffix(t.Kind, "List")}
}

// found is the content of a piece. Lines are relative to the piece's first line, so the
// value stays valid when the piece moves in its file.
type found struct {
	objects  []placed
	problems []placedProblem
}

type placed struct {
	*Object
	line int
}

type placedProblem struct {
	line int
	err  error
}

func (f *found) problem(line int, err error) {
	f.problems = append(f.problems, placedProblem{line, err})
}

// bad reports whether the piece has a problem other than ErrNotUsed.
func (f *found) bad() bool {
	return slices.ContainsFunc(f.problems, func(p placedProblem) bool { return !errors.Is(p.err, ErrNotUsed) })
}

// parse parses a piece.
func parse(p piece) *found {
	f := &found{}
	if text := bytes.TrimSpace(p.text); len(text) == 0 || text[0] != '{' {
		f.yaml(p)
		return f
	}
	f.json(p)
	if !f.bad() {
		return f
	}
	// YAML's flow style has braces too.
	y := &found{}
	if y.yaml(p); !y.bad() {
		return y
	}
	return f
}

// yaml parses a piece that is a YAML document.
func (f *found) yaml(p piece) {
	var root, more yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(p.text))
	err := dec.Decode(&root)
	if err == nil {
		err = dec.Decode(&more)
	}
	if !errors.Is(err, io.EOF) {
		if err == nil {
			err = fmt.Errorf("line %d: a second document begins without a marker", more.Line)
		}
		line, text := yamlError(err)
		line = min(line, bytes.Count(bytes.TrimSpace(p.text), []byte("\n")))
		f.problem(line, errors.New(text))
		return
	}
	if len(root.Content) == 0 {
		return
	}
	f.yamlObject(root.Content[0], p.of, true)
}

var (
	yamlLine = regexp.MustCompile(`line (\d+)(: )?`)
	// yamlParser matches errors that count lines from 0: package yaml adds 1 to the lines
	// of its scanner's errors, but not to those of its parser's errors.
	yamlParser = regexp.MustCompile(`^did not find expected (node content|key|[<',])`)
)

// yamlError returns the line of an error, counted from 0, and its message without the line.
func yamlError(err error) (line int, text string) {
	text = strings.TrimPrefix(err.Error(), "yaml: ")
	m := yamlLine.FindStringSubmatch(text)
	if m == nil {
		return 0, text // package yaml omits the first line's number
	}
	line, _ = strconv.Atoi(m[1])
	text = strings.Replace(text, m[0], "", 1)
	if line > 0 && !yamlParser.MatchString(text) {
		line--
	}
	return line, text
}

// yamlObject parses an object from a node.
func (f *found) yamlObject(n *yaml.Node, of typeMeta, lists bool) {
	first := n.Line - 1
	if n.Kind != yaml.MappingNode {
		f.problem(first, errors.New("is not an object"))
		return
	}
	if t := yamlType(n); lists && t.isList() {
		items := yamlField(n, "items")
		switch {
		case items == nil || items.ShortTag() == "!!null":
		case items.Kind != yaml.SequenceNode:
			f.problem(items.Line-1, fmt.Errorf("items of a %s is not a list", t.Kind))
		default:
			for _, i := range items.Content {
				f.yamlObject(i, t.item(), false)
			}
		}
		return
	}
	text, err := nodeToJSON(n)
	if err != nil {
		line := first
		if e := (*nodeError)(nil); errors.As(err, &e) {
			line = e.line - 1
		}
		f.problem(line, err)
		return
	}
	f.object(text, first, of)
}

func yamlType(n *yaml.Node) typeMeta {
	var t typeMeta
	if k := yamlField(n, "kind"); k != nil {
		t.Kind = k.Value
	}
	if v := yamlField(n, "apiVersion"); v != nil {
		t.APIVersion = v.Value
	}
	return t
}

func yamlField(n *yaml.Node, name string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == name {
			return n.Content[i+1]
		}
	}
	return nil
}

// json parses a piece that consists of JSON values.
func (f *found) json(p piece) {
	dec := json.NewDecoder(bytes.NewReader(p.text))
	lines := lineCounter{text: p.text}
	for {
		var raw json.RawMessage
		err := dec.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			at := dec.InputOffset()
			if e := (*json.SyntaxError)(nil); errors.As(err, &e) {
				at = e.Offset
			}
			f.problem(lineOf(p.text, at), err)
			return
		}
		line := lines.of(dec.InputOffset() - int64(len(raw)))
		var t typeMeta
		if err := json.Unmarshal(raw, &t); err == nil && t.isList() {
			f.jsonList(raw, line, t)
		} else {
			f.object(raw, line, p.of)
		}
	}
}

// jsonList parses the items of a list one by one, so that each item's line is known.
func (f *found) jsonList(raw []byte, line int, list typeMeta) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	lines := lineCounter{text: raw}
	// The text is valid JSON, so tokens cannot fail.
	dec.Token()
	for dec.More() {
		key, _ := dec.Token()
		var value json.RawMessage
		if key != "items" {
			dec.Decode(&value)
			continue
		}
		open, _ := dec.Token()
		if open == nil { // null
			continue
		}
		if open != json.Delim('[') {
			f.problem(line+lines.of(dec.InputOffset()), fmt.Errorf("items of a %s is not a list", list.Kind))
			return
		}
		for dec.More() {
			dec.Decode(&value)
			f.object(value, line+lines.of(dec.InputOffset()-int64(len(value))), list.item())
		}
		dec.Token()
	}
}

// lineCounter counts line breaks like lineOf, for growing offsets in a long text.
type lineCounter struct {
	text []byte
	at   int64
	line int
}

func (c *lineCounter) of(offset int64) int {
	offset = min(max(offset, c.at), int64(len(c.text)))
	c.line += bytes.Count(c.text[c.at:offset], []byte("\n"))
	c.at = offset
	return c.line
}

// lineOf returns the number of line breaks before an offset.
func lineOf(text []byte, offset int64) int {
	return bytes.Count(text[:min(max(offset, 0), int64(len(text)))], []byte("\n"))
}

// object parses one object from JSON whose first line is the given one.
func (f *found) object(text []byte, line int, of typeMeta) {
	if len(text) == 0 || text[0] != '{' {
		f.problem(line, errors.New("is not an object"))
		return
	}
	t := of
	if err := json.Unmarshal(text, &t); err != nil {
		f.problem(line, errors.New("kind and apiVersion must be strings"))
		return
	}
	var into metav1.Object
	var kind Kind
	switch t {
	case typeMeta{"v1", "Service"}:
		kind, into = Service, new(v1.Service)
	case typeMeta{"discovery.k8s.io/v1", "EndpointSlice"}:
		kind, into = EndpointSlice, new(discovery.EndpointSlice)
	case typeMeta{"v1", "Node"}:
		kind, into = Node, new(v1.Node)
	case typeMeta{"networking.k8s.io/v1", "ServiceCIDR"}, typeMeta{"networking.k8s.io/v1beta1", "ServiceCIDR"}:
		kind, into = ServiceCIDR, new(networking.ServiceCIDR)
	default:
		switch {
		case t.Kind == "":
			f.problem(line, errors.New("has no kind"))
		case t.APIVersion == "":
			f.problem(line, fmt.Errorf("%s has no apiVersion", t.Kind))
		default:
			f.problem(line, fmt.Errorf("%s %w", t, ErrNotUsed))
		}
		return
	}
	if err := json.Unmarshal(text, into); err != nil {
		if e := (*json.UnmarshalTypeError)(nil); errors.As(err, &e) {
			line += lineOf(text, e.Offset)
			article := "a"
			if strings.HasPrefix(e.Value, "a") || strings.HasPrefix(e.Value, "o") {
				article = "an" // array, object
			}
			err = fmt.Errorf("%s must not be %s %s", e.Field, article, e.Value)
		}
		f.problem(line, fmt.Errorf("%s: %w", kind, err))
		return
	}
	if into.GetName() == "" {
		f.problem(line, fmt.Errorf("%s has no name", kind))
		return
	}
	setDefaults(into)
	ref := Ref{Kind: kind, NamespacedName: types.NamespacedName{Namespace: into.GetNamespace(), Name: into.GetName()}}
	refused, review := reviewed(into)
	f.objects = append(f.objects, placed{&Object{ref, into, review, refused}, line})
}

// setDefaults sets the API server's defaults of the fields that a node agent reads. The
// docstrings of k8s.io/api's fields document them.
func setDefaults(o metav1.Object) {
	switch o := o.(type) {
	case *v1.Service:
		if o.Namespace == "" {
			o.Namespace = metav1.NamespaceDefault
		}
		for i := range o.Spec.Ports {
			if p := &o.Spec.Ports[i]; p.Protocol == "" {
				p.Protocol = v1.ProtocolTCP
			}
		}
		if o.Spec.SessionAffinity == v1.ServiceAffinityClientIP && (o.Spec.SessionAffinityConfig == nil ||
			o.Spec.SessionAffinityConfig.ClientIP == nil || o.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil) {
			timeout := v1.DefaultClientIPServiceAffinitySeconds
			o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
				ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &timeout},
			}
		}
	case *discovery.EndpointSlice:
		if o.Namespace == "" {
			o.Namespace = metav1.NamespaceDefault
		}
		for i := range o.Ports {
			p := &o.Ports[i]
			if p.Name == nil {
				p.Name = new(string)
			}
			if p.Protocol == nil {
				tcp := v1.ProtocolTCP
				p.Protocol = &tcp
			}
		}
	default: // a Node or ServiceCIDR belongs to no namespace
		o.SetNamespace("")
	}
}
