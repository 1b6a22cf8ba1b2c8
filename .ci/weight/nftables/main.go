// Command nftables uses package nftables of the library and no other backend. It is built, not run.
package main

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
)

func main() {
	b, err := nftables.New(context.Background(), nftables.Config{})
	if err != nil {
		panic(err)
	}
	fmt.Println(b.Apply(context.Background(), &ruleset.Delta{}))
}
