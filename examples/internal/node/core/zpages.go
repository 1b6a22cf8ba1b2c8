package core

import (
	"encoding/json"
	"fmt"
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

// flagz serves the command line. With --config most flags have no effect: see /configz.
func (a *Agent) flagz(w http.ResponseWriter, r *http.Request) {
	flags := map[string]string{}
	for _, f := range a.Config.Flags {
		name, value, _ := strings.Cut(f, "=")
		flags[name] = value
	}
	a.servePage(w, r, "Flagz", strings.Join(a.Config.Flags, "\n")+"\n", map[string]any{"flags": flags})
}

// statusz serves the version, the start time and the paths of the agent. Its emulation
// version is the release of kube-proxy that the agent was compared with.
func (a *Agent) statusz(w http.ResponseWriter, r *http.Request) {
	up, paths := int64(time.Since(a.started).Seconds()), a.paths()
	text := fmt.Sprintf("Started: %s\nUp: %s\nGo version: %s\nBinary version: %s\nEmulation version: %s\nMode: %s\nFamilies: %v\nPaths: %s\n",
		a.started.UTC().Format(time.RFC3339), time.Duration(up)*time.Second, runtime.Version(), a.options.Version,
		config.Kubernetes, a.Config.Mode, a.families, strings.Join(paths, " "))
	a.servePage(w, r, "Statusz", text, map[string]any{
		"startTime": metav1.NewTime(a.started), "uptimeSeconds": up, "goVersion": runtime.Version(),
		"binaryVersion": a.options.Version, "emulationVersion": config.Kubernetes, "paths": paths,
	})
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
func (a *Agent) servePage(w http.ResponseWriter, r *http.Request, kind, text string, object map[string]any) {
	accept, ok := negotiate(kind, r.Header.Get("Accept"))
	if accept.Type == "text" {
		writeText(w, http.StatusOK, fmt.Sprintf("\n%s %s\nWarning: this text is for people. Its form and contents may change.\n\n%s", a.options.Component, strings.ToLower(kind), text))
		return
	}
	code, mediaType := http.StatusNotAcceptable, "application/json"
	if ok {
		code = http.StatusOK
		version := accept.Params["v"]
		if version == "v1alpha1" {
			w.Header().Set("Warning", fmt.Sprintf(`299 - "Version v1alpha1 of %s is deprecated: use v1beta1."`, kind))
		}
		mediaType = fmt.Sprintf("application/%s;g=%s;v=%s;as=%s", accept.SubType, zpageGroup, version, kind)
		object["kind"], object["apiVersion"] = kind, zpageGroup+"/"+version
		object["metadata"] = map[string]string{"name": a.options.Component}
	} else {
		object = map[string]any{
			"kind": "Status", "apiVersion": "v1", "status": metav1.StatusFailure, "reason": metav1.StatusReasonNotAcceptable, "code": code,
			"message": "only the following media types are accepted: application/json, application/yaml, text/plain",
		}
	}
	out, err := json.MarshalIndent(object, "", "  ")
	if err == nil && accept.SubType == "yaml" {
		out, err = yaml.JSONToYAML(out)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Content-Type", mediaType)
	w.WriteHeader(code)
	_, _ = w.Write(out)
}

// negotiate returns the first acceptable clause of an Accept header, in the order of the
// client's preference. Text has the type "text". Without a header the page is text.
func negotiate(kind, header string) (_ goautoneg.Accept, ok bool) {
	text := goautoneg.Accept{Type: "text"}
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
	return goautoneg.Accept{}, false
}
