// Command runner-health uses package runner/health of the library. It is built, not run.
package main

import (
	"net/http"

	"github.com/go-proxier/proxier/runner/health"
)

func main() {
	p, err := health.NewProxy(health.ProxyConfig{Timeout: 1})
	if err != nil {
		panic(err)
	}
	http.Handle("/healthz", p.Healthz())
	if err := http.ListenAndServe("127.0.0.1:0", nil); err != nil {
		panic(err)
	}
}
