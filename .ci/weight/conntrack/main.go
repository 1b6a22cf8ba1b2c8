// Command conntrack uses package conntrack of the library. It is built, not run.
package main

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/conntrack"
)

func main() {
	c, err := conntrack.New(context.Background(), conntrack.Config{})
	if err != nil {
		panic(err)
	}
	fmt.Println(c.Flush(context.Background()))
}
