package manifests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"

	"go.yaml.in/yaml/v3"
)

// Limits on nodeToJSON's output for one object. Objects of the API are far smaller (etcd
// limits them to 1.5 MB); aliases can expand without limit.
const (
	maxDepth = 100
	maxJSON  = 4 << 20
)

// nodeToJSON returns a YAML node as JSON. A value is on the same line in both texts, so an
// error's offset in the JSON gives the line to report.
func nodeToJSON(n *yaml.Node) ([]byte, error) {
	w := jsonWriter{line: n.Line}
	if err := w.node(n, 0); err != nil {
		return nil, err
	}
	return w.Bytes(), nil
}

type jsonWriter struct {
	bytes.Buffer
	line int
}

// nodeError is an error with a line, counted like the nodes' lines.
type nodeError struct {
	line int
	text string
}

func (e *nodeError) Error() string { return e.text }

func errAt(n *yaml.Node, format string, args ...any) error {
	return &nodeError{n.Line, fmt.Sprintf(format, args...)}
}

func (w *jsonWriter) node(n *yaml.Node, depth int) error {
	for ; w.line < n.Line; w.line++ {
		w.WriteByte('\n')
	}
	if depth > maxDepth || w.Len() > maxJSON {
		return errAt(n, "is nested too deeply or too large")
	}
	switch n.Kind {
	case yaml.AliasNode:
		return w.node(n.Alias, depth+1)
	case yaml.ScalarNode:
		return w.scalar(n)
	case yaml.SequenceNode:
		w.WriteByte('[')
		for i, c := range n.Content {
			if i > 0 {
				w.WriteByte(',')
			}
			if err := w.node(c, depth+1); err != nil {
				return err
			}
		}
		w.WriteByte(']')
		return nil
	case yaml.MappingNode:
		return w.mapping(n, depth)
	}
	return errAt(n, "is of an unknown kind")
}

func (w *jsonWriter) mapping(n *yaml.Node, depth int) error {
	w.WriteByte('{')
	seen := make(map[string]bool, len(n.Content)/2)
	if err := w.fields(n, depth, seen, false); err != nil {
		return err
	}
	// A mapping's own fields override merged ones ("<<: *base").
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].ShortTag() != "!!merge" {
			continue
		}
		from := []*yaml.Node{n.Content[i+1]}
		if from[0].Kind == yaml.SequenceNode {
			from = from[0].Content
		}
		for _, m := range from {
			if m.Kind == yaml.AliasNode {
				m = m.Alias
			}
			if m.Kind != yaml.MappingNode {
				return errAt(n.Content[i], "only mappings can be merged")
			}
			if err := w.fields(m, depth, seen, true); err != nil {
				return err
			}
		}
	}
	w.WriteByte('}')
	return nil
}

// fields writes the mapping's own fields. A key that was already seen is omitted when
// merging, and is otherwise an error.
func (w *jsonWriter) fields(n *yaml.Node, depth int, seen map[string]bool, merging bool) error {
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.ShortTag() == "!!merge" {
			continue
		}
		if k.Kind == yaml.AliasNode {
			k = k.Alias
		}
		if k.Kind != yaml.ScalarNode {
			return errAt(k, "a key is not a string")
		}
		if seen[k.Value] {
			if merging {
				continue
			}
			return errAt(k, "%q is there twice", k.Value)
		}
		if len(seen) > 0 {
			w.WriteByte(',')
		}
		seen[k.Value] = true
		for ; w.line < k.Line; w.line++ {
			w.WriteByte('\n')
		}
		if err := w.string(k.Value); err != nil {
			return err
		}
		w.WriteByte(':')
		if err := w.node(v, depth+1); err != nil {
			return err
		}
	}
	return nil
}

var decimal = regexp.MustCompile(`^-?(0|[1-9][0-9]{0,17})$`)

func (w *jsonWriter) scalar(n *yaml.Node) error {
	switch tag := n.ShortTag(); {
	case tag == "!!null":
		w.WriteString("null")
	case tag == "!!int" && decimal.MatchString(n.Value):
		w.WriteString(n.Value)
	case slices.Contains([]string{"!!int", "!!float", "!!bool"}, tag):
		var v any
		if err := n.Decode(&v); err != nil {
			return errAt(n, "%v", err)
		}
		text, err := json.Marshal(v)
		if err != nil { // an infinite number
			return errAt(n, "%v", err)
		}
		w.Write(text)
	default:
		// Times are strings in the API too.
		return w.string(n.Value)
	}
	return nil
}

func (w *jsonWriter) string(s string) error {
	text, err := json.Marshal(s)
	w.Write(text)
	return err
}
