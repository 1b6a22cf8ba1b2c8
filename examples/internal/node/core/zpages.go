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
	flags := map[string]string{}
	for _, f := range a.Config.Flags {
		name, value, _ := strings.Cut(f, "=")
		flags[name] = value
	}
	a.servePage(w, r, "Flagz", strings.Join(a.Config.Flags, "\n")+"\n", func(z zpage) any { return flagz{z, flags} })
}

// statusz serves the version, the start time and the paths of the agent. Its emulation
// version is the release of kube-proxy that the agent was compared with.
func (a *Agent) statusz(w http.ResponseWriter, r *http.Request) {
	s := statusz{
		StartTime: metav1.NewTime(a.started), UptimeSeconds: int64(time.Since(a.started).Seconds()),
		GoVersion: runtime.Version(), BinaryVersion: a.options.Version, EmulationVersion: config.Kubernetes,
		Paths: a.paths(),
	}
	text := fmt.Sprintf("Started: %s\nUp: %s\nGo version: %s\nBinary version: %s\nEmulation version: %s\nMode: %s\nFamilies: %v\nPaths: %s\n",
		s.StartTime.UTC().Format(time.RFC3339), time.Duration(s.UptimeSeconds)*time.Second, s.GoVersion, s.BinaryVersion,
		s.EmulationVersion, a.Config.Mode, a.families, strings.Join(s.Paths, " "))
	a.servePage(w, r, "Statusz", text, func(z zpage) any { s.zpage = z; return s })
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

// servePage answers a request as its Accept header demands, as kube-proxy does: with text for people, whose form may
// change, with JSON or YAML of an object whose group, version and kind the header names
// ("application/json;g=config.k8s.io;v=v1beta1;as=Flagz"), or with the status 406.
func (a *Agent) servePage(w http.ResponseWriter, r *http.Request, kind, text string, object func(zpage) any) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	accept, ok := negotiate(kind, r.Header.Get("Accept"))
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
		fmt.Fprintf(w, "\n%s %s\nWarning: this text is for people. Its form and contents may change.\n\n%s", a.options.Component, strings.ToLower(kind), text)
	default:
		version := accept.Params["v"]
		if version == "v1alpha1" {
			w.Header().Set("Warning", fmt.Sprintf(`299 - "Version v1alpha1 of %s is deprecated: use v1beta1."`, kind))
		}
		encode := encodeJSON
		if accept.SubType == "yaml" {
			encode = yaml.Marshal
		}
		w.Header().Set("Content-Type", fmt.Sprintf("application/%s;g=%s;v=%s;as=%s", accept.SubType, zpageGroup, version, kind))
		writePage(w, encode, object(zpage{metav1.TypeMeta{Kind: kind, APIVersion: zpageGroup + "/" + version}, metav1.ObjectMeta{Name: a.options.Component}}))
	}
}

// negotiate returns the first acceptable clause of an Accept header, in the order of the
// client's preference. Text has the type "text". Without a header the page is text.
func negotiate(kind, header string) (_ goautoneg.Accept, ok bool) {
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
			known := slices.Equal(named, []string{kind, zpageGroup, "v1beta1"}) || slices.Equal(named, []string{kind, zpageGroup, "v1alpha1"})
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
