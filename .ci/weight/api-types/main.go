// Command api-types has the API types that the library's packages are about, as a
// program has to that feeds any of them. It is built, not run.
package main

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

func main() {
	fmt.Println(v1.Service{}, discovery.EndpointSlice{}, types.NamespacedName{}, validation.IsValidLabelValue(""))
}
