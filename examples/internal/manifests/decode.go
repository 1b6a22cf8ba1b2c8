package manifests

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
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

// document is a YAML document, or JSON values up to the next marker. A document is parsed by itself, so
// bad syntax affects one document alone.
type document struct {
	line     int               // of the file at which the text begins, from 1
	text     [sha256.Size]byte // the hash of the text
	objects  []*Object
	problems []error
}

// parse parses a file's documents. It takes those that the file had before. A line that begins with "---" or "..." ends
// a YAML document in any context (YAML 1.2.2, section 9.1.2), and cannot occur in JSON.
func parse(data []byte, before []document) (out []document) {
	known := map[[sha256.Size]byte]document{}
	for _, d := range before {
		known[d.text] = d
	}
	line, begin, text := 0, 0, []byte(nil)
	end := func() {
		if len(bytes.TrimSpace(text)) != 0 {
			d, ok := known[sha256.Sum256(text)]
			if !ok {
				d = newDocument(text)
			}
			d.line = begin
			out = append(out, d)
		}
		text = nil
	}
	for l := range bytes.Lines(bytes.TrimPrefix(data, []byte("\ufeff"))) {
		line++
		if bytes.HasPrefix(l, []byte("---")) || bytes.HasPrefix(l, []byte("...")) {
			if rest := l[3:]; len(rest) == 0 || bytes.IndexByte([]byte(" \t\r\n"), rest[0]) >= 0 {
				end()
				l = rest
			}
		}
		if text == nil {
			if t := bytes.TrimSpace(l); len(t) == 0 || t[0] == '#' || t[0] == '%' {
				continue
			}
			begin = line
		}
		text = append(text, l...)
	}
	end()
	return out
}

// values returns the JSON values of a document, up to the first error.
func values(text []byte) (out []json.RawMessage, err error) {
	if text[0] == '{' {
		for dec := json.NewDecoder(bytes.NewReader(text)); ; {
			var raw json.RawMessage
			if err = dec.Decode(&raw); errors.Is(err, io.EOF) {
				return out, nil
			} else if err != nil && len(out) != 0 {
				return out, err
			} else if err != nil {
				break // YAML's flow style has braces, too
			}
			out = append(out, raw)
		}
	}
	raw, yamlErr := yaml.YAMLToJSONStrict(text)
	if yamlErr != nil && err == nil {
		text := strings.TrimPrefix(yamlErr.Error(), "error converting YAML to JSON: ")
		err = errors.New(strings.Join(strings.Fields(text), " ")) // one line
	}
	if yamlErr != nil {
		return nil, err
	}
	return []json.RawMessage{raw}, nil
}

// newDocument returns the content of a document.
func newDocument(text []byte) document {
	d := document{text: sha256.Sum256(text)}
	add := func(raw json.RawMessage, t metav1.TypeMeta) {
		o, err := newObject(raw, t)
		if err != nil {
			d.problems = append(d.problems, err)
			return
		}
		d.objects = append(d.objects, o)
	}
	values, err := values(text)
	for _, raw := range values {
		var list struct {
			metav1.TypeMeta
			Items []json.RawMessage `json:"items"`
		}
		if err := json.Unmarshal(raw, &list); !strings.HasSuffix(list.Kind, "List") {
			add(raw, metav1.TypeMeta{})
		} else if err != nil {
			d.problems = append(d.problems, fmt.Errorf("items of a %s is not a list", list.Kind))
		}
		item := metav1.TypeMeta{}
		if list.Kind != "List" {
			item = metav1.TypeMeta{APIVersion: list.APIVersion, Kind: strings.TrimSuffix(list.Kind, "List")}
		}
		for _, raw := range list.Items {
			add(raw, item)
		}
	}
	if err != nil {
		d.problems = append(d.problems, err)
	}
	return d
}

// newObject returns an object, or an error that names it. t is its type if it has none of its own.
func newObject(raw json.RawMessage, t metav1.TypeMeta) (*Object, error) {
	if raw[0] != '{' {
		return nil, errors.New("is not an object")
	}
	sum := sha256.Sum256(append([]byte(t.String()), raw...))
	if err := json.Unmarshal(raw, &t); err != nil {
		return nil, errors.New("kind and apiVersion must be strings")
	}
	var into metav1.Object
	switch name := t.APIVersion + " " + t.Kind; name {
	case "v1 Service":
		into = new(v1.Service)
	case "discovery.k8s.io/v1 EndpointSlice":
		into = new(discovery.EndpointSlice)
	case "v1 Node":
		into = new(v1.Node)
	case "networking.k8s.io/v1 ServiceCIDR", "networking.k8s.io/v1beta1 ServiceCIDR":
		into = new(networking.ServiceCIDR)
	default:
		switch {
		case t.Kind == "":
			return nil, errors.New("has no kind")
		case t.APIVersion == "":
			return nil, fmt.Errorf("%s has no apiVersion", t.Kind)
		}
		return nil, fmt.Errorf("%s %w", name, ErrNotUsed)
	}
	err := json.Unmarshal(raw, into)
	ref := Ref{Kind: Kind(t.Kind), NamespacedName: types.NamespacedName{Namespace: into.GetNamespace(), Name: into.GetName()}}
	what := ref.String()
	if ref.Name == "" {
		what = t.Kind
	}
	switch e := (*json.UnmarshalTypeError)(nil); {
	case errors.As(err, &e):
		return nil, fmt.Errorf("%s: %s must not be a JSON %s", what, e.Field, e.Value)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", what, err)
	case ref.Name == "":
		return nil, fmt.Errorf("%s has no name", t.Kind)
	}
	setDefaults(into)
	ref.Namespace = into.GetNamespace()
	refused, review := reviewed(into)
	return &Object{Ref: ref, Value: into, json: sum, review: review, refused: refused}, nil
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
