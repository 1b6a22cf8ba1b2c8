package nftables

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestLayersImportDownwards reads the imports of the layers below this package. The compiler rules out
// cycles only.
func TestLayersImportDownwards(t *testing.T) {
	t.Parallel()
	const internal = "github.com/go-proxier/proxier/nftables/"
	for layer, allowed := range map[string]string{"layout": "", "model": "internal/layout", "kernel": "internal/layout internal/model", "memory": "internal/layout internal/kernel"} {
		files, err := filepath.Glob(filepath.Join("internal", layer, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no files of %s, error %v", layer, err)
		}
		for _, file := range files {
			f := must.Get(parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly))(t)
			for _, i := range f.Imports {
				name, below := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), internal)
				if below && !strings.Contains(" "+allowed+" ", " "+name+" ") {
					t.Errorf("%s imports %s", file, name)
				}
			}
		}
	}
}
