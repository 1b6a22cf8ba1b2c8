// Command tracker uses package tracker of the library. It is built, not run.
package main

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/tracker"
)

func main() {
	t, err := tracker.New(tracker.Config{})
	if err != nil {
		panic(err)
	}
	t.SetService(&v1.Service{})
	t.SetSlice(&discovery.EndpointSlice{})
	fmt.Println(t.Take())
}
