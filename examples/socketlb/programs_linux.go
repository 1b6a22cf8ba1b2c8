package socketlb

import (
	"bytes"
	_ "embed"
	"encoding/binary"

	"github.com/cilium/ebpf"
)

// Debian's clang and llvm-strip of release 12 make these bytes; .ci/run compares them.
//
//go:generate ./compile

//go:embed programs_el.o
var littleEndian []byte

//go:embed programs_eb.o
var bigEndian []byte

// readPrograms returns the maps and programs of programs.c.
func readPrograms() (*ebpf.CollectionSpec, error) {
	code := littleEndian
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		code = bigEndian
	}
	return ebpf.LoadCollectionSpecFromReader(bytes.NewReader(code))
}
