package run

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	"k8s.io/component-base/logs"
)

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
