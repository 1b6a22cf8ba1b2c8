package manifests_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/go-proxier/proxier/examples/internal/manifests"
)

// A Reader returns the differences since its last call.
func ExampleReader() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(text), 0o644); err != nil {
			fmt.Println(err)
		}
	}
	r := manifests.NewReader(dir)
	read := func() {
		c, err := r.Read()
		if err != nil {
			fmt.Println(err)
		}
		for _, o := range c.Set {
			fmt.Println("set ", o.Ref)
		}
		for _, ref := range c.Gone {
			fmt.Println("gone", ref)
		}
		for _, p := range c.Problems {
			fmt.Printf("line %d: %v\n", p.Line, p.Err)
		}
	}
	write(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
---
apiVersion: v1
kind: Node
metadata: {name: n1}
`)
	read()
	write(`
apiVersion: v1
kind: Service
metadata: {name: 80}
---
apiVersion: v1
kind: Node
metadata: {name: n1}
`)
	read()
	// Output:
	// set  Service shop/web
	// set  Node n1
	// gone Service shop/web
	// line 2: Service: metadata.name must not be a JSON number
}
