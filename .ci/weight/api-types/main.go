// Command api-types uses the API types of the library's packages, as every program does that
// uses one of them. It is built, not run.
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
