// Graphs draws the results of benchmarks for the README: cold start and one change against
// the number of Services, for a light and a dark background.
//
//	graphs --bench FILE --rival FILE --out FOLDER
//
// FILE of --bench is the output of package nftables' benchmarks. They measure the library
// alone, from objects in memory to the kernel's commit, and the floor:
//
//	go test -run '^$' -bench 'ColdStart|OneEndpointChanged' -benchtime 10x \
//		-sizes 100x10,1000x10,3000x10,10000x10,45000x10 ./nftables
//
// FILE of --rival is the JSON of ../rival; the flag may be repeated, and later files replace runs of
// earlier ones. rival measures nodeproxy and kube-proxy with an API server, until an endpoint
// answers the first connection. The same input gives the same bytes. This command draws the graphs
// beside this file from the results in the tree:
//
//	go generate ./examples/e2e/graphs
package main

//go:generate go run . --bench testdata/nftables.txt --rival ../rival/testdata/rival-45000.json --rival ../rival/testdata/rival-10000.json --rival ../rival/testdata/rival.json --out .

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

func main() {
	err := run(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "graphs:", err)
		os.Exit(1)
	}
}

func run(args []string, diag io.Writer) error {
	f := flag.NewFlagSet("graphs", flag.ContinueOnError)
	f.SetOutput(diag)
	bench := f.String("bench", "", "the `file` with the output of go test -bench")
	var rival []string
	f.Func("rival", "a `file` with the JSON of rival; may be repeated", func(file string) error {
		rival = append(rival, file)
		return nil
	})
	out := f.String("out", ".", "the `folder` to write the graphs to")
	if err := f.Parse(args); err != nil {
		return err
	}
	var d data
	if *bench == "" || len(rival) == 0 {
		return errors.New("--bench and --rival need a file each")
	}
	if err := read(*bench, d.addBench); err != nil {
		return err
	}
	for _, file := range rival {
		if err := read(file, d.addRival); err != nil {
			return err
		}
	}
	for _, g := range d.graphs() {
		if len(g.lines) == 0 {
			return fmt.Errorf("no figures for %q in the input", g.title)
		}
		for _, t := range themes {
			name := filepath.Join(*out, g.file+"-"+t.name+".svg")
			if err := os.WriteFile(name, g.svg(t), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
