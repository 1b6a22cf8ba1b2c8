package main

import (
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"time"
)

// The pages that Kubernetes components have for a look at one of them by hand
// (KEP-4828, KEP-4827). They are for people, and may be put otherwise any time.

func page(w http.ResponseWriter, title string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	fmt.Fprintf(w, "%s %s\nNot for programs: what is here, and how, may change.\n\n", component, title)
}

// flagz shows the command line. With --config most of it is without effect: see
// /configz.
func (a *agent) flagz(w http.ResponseWriter, _ *http.Request) {
	page(w, "flagz")
	for _, f := range a.cfg.Flags {
		fmt.Fprintln(w, f)
	}
}

// statusz shows what runs, and since when.
func (a *agent) statusz(w http.ResponseWriter, _ *http.Request) {
	page(w, "statusz")
	paths := []string{"/configz", "/flagz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz"}
	if a.cfg.Effective.EnableProfiling {
		paths = append([]string{"/debug/pprof/"}, paths...)
	}
	fmt.Fprintf(w, "Started: %s\nUp: %s\nGo version: %s\nBinary version: %s\nMode: %s\nFamilies: %v\nPaths: %s\n",
		a.started.UTC().Format(time.RFC3339), time.Since(a.started).Round(time.Second), runtime.Version(), version(),
		a.cfg.Mode, a.families, strings.Join(paths, " "))
}
