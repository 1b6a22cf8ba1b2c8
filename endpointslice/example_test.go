package endpointslice_test

import (
	"fmt"

	"github.com/go-proxier/proxier/endpointslice"
)

// Move an endpoint from one slice of its Service to another and add one. Only the new
// endpoint is a change.
func Example() {
	c := endpointslice.New(endpointslice.Plain(nil))
	c.Set(slice("web-1", "web", ep("10.0.0.1"), ep("10.0.0.2")))
	c.Set(slice("web-2", "web", ep("10.0.0.3")))
	c.Take()

	c.Set(slice("web-1", "web", ep("10.0.0.1")))
	c.Set(slice("web-2", "web", ep("10.0.0.2"), ep("10.0.0.3"), ep("10.0.0.4")))
	for _, change := range c.Take() {
		for i, port := range change.New {
			fmt.Println(change.Service, port.Name, "had", len(change.Old[i].Endpoints), "has", len(port.Endpoints))
			for _, e := range port.Endpoints {
				fmt.Println(" ", e.Addr)
			}
		}
	}
	// Output:
	// ns/web http had 3 has 4
	//   10.0.0.1:80
	//   10.0.0.2:80
	//   10.0.0.3:80
	//   10.0.0.4:80
}
