// Command ipvs uses package ipvs of the library and no other backend. It is built, not run.
package main

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
)

func main() {
	b, err := ipvs.New(context.Background(), ipvs.Config{})
	if err != nil {
		panic(err)
	}
	fmt.Println(b.Apply(context.Background(), &ruleset.Delta{}))
}
