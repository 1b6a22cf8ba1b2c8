// Command runner uses package runner of the library. It is built, not run.
package main

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/runner"
)

func main() {
	r, err := runner.New(runner.Config{}, func(context.Context) error { return nil })
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Run(context.Background()))
}
