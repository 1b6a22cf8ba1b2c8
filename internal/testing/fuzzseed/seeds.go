// Package fuzzseed keeps the seeds of a fuzz target in one file.
package fuzzseed

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// header is the first line of each file that go test -fuzz writes.
const header = "go test fuzz v1\n"

// Add adds the seeds in testdata/FuzzX.txt to the target FuzzX. The file consists of the files that
// go test -fuzz writes to testdata/fuzz/FuzzX, one after the other.
func Add(f *testing.F) {
	f.Helper()
	file := filepath.Join("testdata", f.Name()+".txt")
	text, err := os.ReadFile(file)
	if err != nil {
		f.Fatal(err)
	}
	seeds, err := parse(string(text))
	if err != nil {
		f.Fatalf("%s: %v", file, err)
	}
	for _, s := range seeds {
		f.Add(s...)
	}
}

// parse returns the arguments of each seed.
func parse(text string) (seeds [][]any, err error) {
	text, ok := strings.CutPrefix(text, header)
	if !ok {
		return nil, fmt.Errorf("the first line is not %q", header)
	}
	for seed := range strings.SplitSeq(text, "\n"+header) {
		var args []any
		for line := range strings.Lines(seed) {
			arg, err := parseValue(strings.TrimSpace(line))
			if err != nil {
				return nil, fmt.Errorf("seed %d: %q: %w", len(seeds)+1, line, err)
			}
			args = append(args, arg)
		}
		seeds = append(seeds, args)
	}
	return seeds, nil
}

// parseValue parses a conversion of a literal, such as uint16(80), to a type that a target here has.
func parseValue(text string) (any, error) {
	text, ok := strings.CutSuffix(text, ")")
	typ, literal, found := strings.Cut(text, "(")
	if !ok || !found {
		return nil, strconv.ErrSyntax
	}
	switch typ {
	case "string":
		return strconv.Unquote(literal)
	case "[]byte":
		s, err := strconv.Unquote(literal)
		return []byte(s), err
	case "byte":
		s, err := strconv.Unquote(literal)
		r, _ := utf8.DecodeRuneInString(s)
		if r > 255 {
			err = strconv.ErrRange
		}
		return byte(r), err
	case "uint16":
		n, err := strconv.ParseUint(literal, 0, 16)
		return uint16(n), err
	case "uint32":
		n, err := strconv.ParseUint(literal, 0, 32)
		return uint32(n), err
	case "uint64":
		return strconv.ParseUint(literal, 0, 64)
	case "int64":
		return strconv.ParseInt(literal, 0, 64)
	}
	return nil, fmt.Errorf("no seed can have the type %s", typ)
}
