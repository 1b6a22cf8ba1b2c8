// Oldest prints the objects of folders as kubectl 1.31 builds them, the oldest that nodeproxy's README names. It has
// kustomize's API 0.17.2. The module of the folder above has that of the newest kubectl.
package main

import (
	"fmt"
	"os"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

func main() {
	for _, folder := range os.Args[1:] {
		built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), folder)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		text, err := built.AsYaml()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Printf("---\n%s", text)
	}
}
