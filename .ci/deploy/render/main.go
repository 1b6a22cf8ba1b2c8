// Render prints the objects of a folder of nodeproxy's manifests, or of its Helm chart with values in
// YAML. It runs in the folder above.
//
//	go run ./render kustomize ../../examples/nodeproxy/deploy/overlays/kubeadm
//	go run ./render chart '{kubeadm: true}'
package main

import (
	"fmt"
	"os"
	"strings"

	deploy "proxier.example/ci/deploy"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: render kustomize FOLDER | chart VALUES")
		os.Exit(2)
	}
	var out []string
	var err error
	switch os.Args[1] {
	case "kustomize":
		out, err = deploy.Kustomized(os.Args[2])
	case "chart":
		out, err = deploy.Rendered("kube-system", os.Args[2])
	default:
		err = fmt.Errorf("no command %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
	fmt.Println(strings.Join(out, "\n---\n"))
}
