package core

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/munnerz/goautoneg"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	zpages "k8s.io/component-base/zpages/features"
	"sigs.k8s.io/yaml"

	"github.com/go-proxier/proxier/examples/internal/node/config"
)

// addPages adds the pages /flagz and /statusz of Kubernetes components (KEP-4828, KEP-4827),
// as far as the feature gates enable them.
func (a *Agent) addPages(mux *http.ServeMux) {
	if a.Config.Gates.Enabled(zpages.ComponentFlagz) {
		mux.HandleFunc("/flagz", a.flagz)
	}
	if a.Config.Gates.Enabled(zpages.ComponentStatusz) {
		mux.HandleFunc("/statusz", a.statusz)
	}
}

// zpageGroup is the API group of the pages' objects, in the versions v1beta1 and v1alpha1. Its Go types
// are in k8s.io/apiserver since Kubernetes 1.36.
const zpageGroup = "config.k8s.io"

// zpage is what the objects have in common.
type zpage struct {
	metav1.TypeMeta   `json:""`
	metav1.ObjectMeta `json:"metadata,omitempty"`
}

type flagz struct {
	zpage
	Flags map[string]string `json:"flags,omitempty"`
}

type statusz struct {
	zpage
	StartTime        metav1.Time `json:"startTime"`
	UptimeSeconds    int64       `json:"uptimeSeconds"`
	GoVersion        string      `json:"goVersion"`
	BinaryVersion    string      `json:"binaryVersion"`
	EmulationVersion string      `json:"emulationVersion,omitempty"`
	Paths            []string    `json:"paths"`
}

// flagz serves the command line. With --config most flags have no effect: see /configz.
func (a *Agent) flagz(w http.ResponseWriter, r *http.Request) {
	p := page{component: a.options.Component, kind: "Flagz", text: func(w io.Writer) {
		for _, f := range a.Config.Flags {
			fmt.Fprintln(w, f)
		}
	}}
	p.object = func(t metav1.TypeMeta) any {
		out := flagz{zpage: zpage{t, metav1.ObjectMeta{Name: a.options.Component}}, Flags: map[string]string{}}
		for _, f := range a.Config.Flags {
			name, value, _ := strings.Cut(f, "=")
			out.Flags[name] = value
		}
		return out
	}
	p.serve(w, r)
}

// statusz serves the version, the start time and the paths of the agent. Its emulation
// version is the release of kube-proxy that the agent was compared with.
func (a *Agent) statusz(w http.ResponseWriter, r *http.Request) {
	s := statusz{
		zpage:     zpage{ObjectMeta: metav1.ObjectMeta{Name: a.options.Component}},
		StartTime: metav1.NewTime(a.started), UptimeSeconds: int64(time.Since(a.started).Seconds()),
		GoVersion: runtime.Version(), BinaryVersion: a.options.Version, EmulationVersion: config.Kubernetes,
		Paths: a.paths(),
	}
	page{
		component: a.options.Component, kind: "Statusz",
		text: func(w io.Writer) {
			fmt.Fprintf(w, "Started: %s\nUp: %s\nGo version: %s\nBinary version: %s\nEmulation version: %s\nMode: %s\nFamilies: %v\nPaths: %s\n",
				s.StartTime.UTC().Format(time.RFC3339), time.Duration(s.UptimeSeconds)*time.Second, s.GoVersion, s.BinaryVersion,
				s.EmulationVersion, a.Config.Mode, a.families, strings.Join(s.Paths, " "))
		},
		object: func(t metav1.TypeMeta) any { s.TypeMeta = t; return s },
	}.serve(w, r)
}

// paths returns the paths of the metrics server, sorted.
func (a *Agent) paths() []string {
	paths := []string{"/configz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz"}
	if a.Config.Gates.Enabled(zpages.ComponentFlagz) {
		paths = append(paths, "/flagz")
	}
	if a.options.Debug != nil {
		paths = append(paths, "/debug/flags/v", "/debug/pprof/")
	}
	slices.Sort(paths)
	return paths
}

// page is a page for people and for programs. People get text, whose form may change.
// Programs get an object of the API group config.k8s.io, if they ask for it by its kind.
type page struct {
	component, kind string
	text            func(io.Writer)
	object          func(metav1.TypeMeta) any
}

// serve answers a request as its Accept header demands, as kube-proxy does: with text, with
// JSON or YAML of an object whose group, version and kind the header names
// ("application/json;g=config.k8s.io;v=v1beta1;as=Flagz"), or with the status 406.
func (p page) serve(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	accept, ok := p.negotiate(r.Header.Get("Accept"))
	switch {
	case !ok:
		const message = "only the following media types are accepted: application/json, application/yaml, text/plain"
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotAcceptable)
		writePage(w, encodeJSON, metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
			Message: message, Reason: metav1.StatusReasonNotAcceptable, Code: http.StatusNotAcceptable,
		})
	case accept.Type == "text":
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "\n%s %s\nWarning: this text is for people. Its form and contents may change.\n\n", p.component, strings.ToLower(p.kind))
		p.text(w)
	default:
		version := accept.Params["v"]
		if version == "v1alpha1" {
			w.Header().Set("Warning", fmt.Sprintf(`299 - "Version v1alpha1 of %s is deprecated: use v1beta1."`, p.kind))
		}
		encode := encodeJSON
		if accept.SubType == "yaml" {
			encode = yaml.Marshal
		}
		w.Header().Set("Content-Type", fmt.Sprintf("application/%s;g=%s;v=%s;as=%s", accept.SubType, zpageGroup, version, p.kind))
		writePage(w, encode, p.object(metav1.TypeMeta{Kind: p.kind, APIVersion: zpageGroup + "/" + version}))
	}
}

// negotiate returns the first acceptable clause of an Accept header, in the order of the
// client's preference. Text has the type "text". Without a header the page is text.
func (p page) negotiate(header string) (_ goautoneg.Accept, ok bool) {
	text := goautoneg.Accept{Type: "text", SubType: "plain"}
	if header == "" {
		return text, true
	}
	for _, c := range goautoneg.ParseAccept(header) {
		var named []string // what the clause demands of an object
		for _, key := range slices.Sorted(maps.Keys(c.Params)) {
			if key == "as" || key == "g" || key == "v" {
				named = append(named, c.Params[key])
			}
		}
		switch c.Type + "/" + c.SubType {
		case "*/*", "text/*", "text/plain":
			if len(named) == 0 && c.Q > 0 {
				return text, true
			}
		case "application/json", "application/yaml":
			known := slices.Equal(named, []string{p.kind, zpageGroup, "v1beta1"}) || slices.Equal(named, []string{p.kind, zpageGroup, "v1alpha1"})
			if known && c.Q > 0 {
				return c, true
			}
		}
	}
	return text, false
}

func encodeJSON(o any) ([]byte, error) { return json.MarshalIndent(o, "", "  ") }

func writePage(w io.Writer, encode func(any) ([]byte, error), o any) {
	if text, err := encode(o); err == nil { // these objects have nothing that cannot be encoded
		_, _ = w.Write(text)
	}
}
