// Command iptables uses package iptables of the library and no other backend. It is built, not run.
package main

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
)

func main() {
	b, err := iptables.New(context.Background(), iptables.Config{})
	if err != nil {
		panic(err)
	}
	fmt.Println(b.Apply(context.Background(), &ruleset.Delta{}))
}
