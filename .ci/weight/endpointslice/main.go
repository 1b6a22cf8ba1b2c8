// Command endpointslice uses package endpointslice of the library. It is built, not run.
package main

import (
	"fmt"

	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/endpointslice"
)

func main() {
	c := endpointslice.New(endpointslice.Plain(nil))
	c.Set(&discovery.EndpointSlice{})
	fmt.Println(c.Take())
}
