package main

import (
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"k8s.io/component-base/logs"
	zpages "k8s.io/component-base/zpages/features"
)

// addPages adds the pages /flagz and /statusz of Kubernetes components (KEP-4828, KEP-4827),
// as far as the feature gates enable them. The pages are for people; their format may
// change.
func (a *agent) addPages(mux *http.ServeMux) {
	if a.cfg.Gates.Enabled(zpages.ComponentFlagz) {
		mux.HandleFunc("/flagz", a.flagz)
	}
	if a.cfg.Gates.Enabled(zpages.ComponentStatusz) {
		mux.HandleFunc("/statusz", a.statusz)
	}
}

func page(w http.ResponseWriter, title string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	fmt.Fprintf(w, "%s %s\nNot for programs: contents and format may change.\n\n", component, title)
}

// flagz shows the command line. With --config most flags have no effect: see /configz.
func (a *agent) flagz(w http.ResponseWriter, _ *http.Request) {
	page(w, "flagz")
	for _, f := range a.cfg.Flags {
		fmt.Fprintln(w, f)
	}
}

// statusz shows the version, the start time and the paths of the agent.
func (a *agent) statusz(w http.ResponseWriter, _ *http.Request) {
	page(w, "statusz")
	paths := []string{"/configz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz"}
	if a.cfg.Gates.Enabled(zpages.ComponentFlagz) {
		paths = append(paths, "/flagz")
	}
	if a.cfg.Effective.EnableProfiling {
		paths = append(paths, "/debug/flags/v", "/debug/pprof/")
	}
	slices.Sort(paths)
	fmt.Fprintf(w, "Started: %s\nUp: %s\nGo version: %s\nBinary version: %s\nMode: %s\nFamilies: %v\nPaths: %s\n",
		a.started.UTC().Format(time.RFC3339), time.Since(a.started).Round(time.Second), runtime.Version(), version(),
		a.cfg.Mode, a.families, strings.Join(paths, " "))
}

// setVerbosity sets --v for the whole process to the body of a PUT request, with the
// status codes of kube-proxy.
func setVerbosity(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodPut {
		w.WriteHeader(http.StatusNotAcceptable)
		fmt.Fprintln(w, "unsupported http method")
		return
	}
	level, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 16))
	var done string
	if err == nil {
		done, err = logs.GlogSetter(strings.TrimSpace(string(level)))
	}
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprintln(w, err)
		return
	}
	fmt.Fprintln(w, done)
}
