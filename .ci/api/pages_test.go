package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// files returns the paths of the tree's files with the ending, relative to the root. Folders that git ignores and
// those of test data are left out.
func files(t *testing.T, ending string) (paths []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata") {
			return fs.SkipDir
		}
		if rel, _ := filepath.Rel(root, path); err == nil && !d.IsDir() && strings.HasSuffix(path, ending) {
			paths = append(paths, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// text returns the content of a file of the tree.
func text(t *testing.T, path string) string {
	t.Helper()
	b := get(os.ReadFile(filepath.Join(root, path)))(t)
	return string(b)
}

// source is the Go code of the tree, whatever its build tags.
type source struct {
	// declared holds, by folder, the names declared there: "Name" and "Type.Member".
	declared map[string]map[string]bool
	// folders holds the folders of each package name.
	folders map[string][]string
	// words holds every identifier in code, not in comments.
	words map[string]bool
	// comments holds the comments of each file.
	comments map[string][]*ast.CommentGroup
	// imports holds the package names that each file imports, by their last element.
	imports map[string]map[string]bool
}

func parse(t *testing.T) *source {
	t.Helper()
	s := &source{map[string]map[string]bool{}, map[string][]string{}, map[string]bool{}, map[string][]*ast.CommentGroup{}, map[string]map[string]bool{}}
	fset := token.NewFileSet()
	for _, path := range files(t, ".go") {
		f := get(parser.ParseFile(fset, path, text(t, path), parser.ParseComments|parser.SkipObjectResolution))(t)
		dir := filepath.Dir(path)
		if s.declared[dir] == nil {
			s.declared[dir] = map[string]bool{}
			s.folders[f.Name.Name] = append(s.folders[f.Name.Name], dir)
		}
		s.comments[path] = f.Comments
		s.imports[path] = map[string]bool{}
		for _, i := range f.Imports {
			name := strings.Trim(i.Path.Value, `"`)
			if s.imports[path][filepath.Base(name)] = true; i.Name != nil {
				s.imports[path][i.Name.Name] = true
			}
		}
		s.add(dir, f)
	}
	return s
}

// add records the declarations and identifiers of a file.
func (s *source) add(dir string, f *ast.File) {
	names := s.declared[dir]
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			s.words[n.Name] = true
		case *ast.FuncDecl:
			if n.Recv == nil {
				names[n.Name.Name] = true
			} else {
				names[receiverName(n)+"."+n.Name.Name] = true
			}
		case *ast.ValueSpec:
			for _, name := range n.Names {
				names[name.Name] = true
			}
		case *ast.TypeSpec:
			names[n.Name.Name] = true
			var members *ast.FieldList
			switch t := n.Type.(type) {
			case *ast.StructType:
				members = t.Fields
			case *ast.InterfaceType:
				members = t.Methods
			}
			if members != nil {
				for _, m := range members.List {
					for _, name := range m.Names {
						names[n.Name.Name+"."+name.Name] = true
					}
				}
			}
		}
		return true
	})
}

// has reports whether a folder declares a name, such as Type or Type.Member. A member may come from an embedded type.
func (s *source) has(dir, name string) bool {
	first, member, two := strings.Cut(name, ".")
	return s.declared[dir][name] || two && s.declared[dir][first] && s.words[member] && s.embeds(dir)
}

// embeds reports whether a folder is one of those whose types promote members of other packages.
func (s *source) embeds(dir string) bool { return strings.HasPrefix(dir, "examples") }

var (
	docLink   = regexp.MustCompile(`\[\*?([A-Za-z]\w*(?:\.[A-Za-z]\w*){0,2})\]`)
	codeBlock = regexp.MustCompile(`(?m)^\t.*$`)
	quoted    = regexp.MustCompile("`([^`\n]+)`")
	// qualified matches a name with a package or a type before it, such as ruleset.Port, Port.Spec and c.Old.
	qualified = regexp.MustCompile(`^\*?[A-Za-z]\w*(?:\.[A-Z]\w*)+(?:\(\))?$`)
)

// TestNamesInCommentsExist checks that the tree declares what doc links in comments name: a type of the package, or
// a name of another package such as ruleset.NewEngine.
func TestNamesInCommentsExist(t *testing.T) {
	s := parse(t)
	for path, groups := range s.comments {
		dir := filepath.Dir(path)
		for _, g := range groups {
			for _, m := range docLink.FindAllStringSubmatch(codeBlock.ReplaceAllString(g.Text(), ""), -1) {
				first, rest, two := strings.Cut(m[1], ".")
				switch {
				case s.has(dir, m[1]), !two && !ast.IsExported(first), strings.Contains(g.Text(), m[0]+": "):
				case ast.IsExported(first):
					t.Errorf("%s: [%s] is declared nowhere in its package", path, m[1])
				case s.imports[path][first] || len(s.folders[first]) != 0:
					ok := len(s.folders[first]) == 0 // another module's
					for _, d := range s.folders[first] {
						ok = ok || s.has(d, rest)
					}
					if !ok {
						t.Errorf("%s: [%s] is declared in no package %s of the tree", path, m[1], first)
					}
				}
			}
		}
	}
}

// exists reports whether some folder declares a name as a page quotes it: as package.Name, as Type.Member, or, after a
// word that is neither a package nor a type, as a member of any type. What follows must be a member of any type.
func (s *source) exists(name string) bool {
	parts := strings.Split(name, ".")
	if !s.words[parts[len(parts)-1]] {
		return false
	}
	dirs := s.folders[parts[0]]
	if dirs != nil && len(parts) > 1 {
		parts = parts[1:]
	} else {
		for dir := range s.declared {
			if ast.IsExported(parts[0]) && s.declared[dir][parts[0]] {
				dirs = append(dirs, dir)
			}
		}
	}
	for _, dir := range dirs {
		if s.has(dir, strings.Join(parts[:min(2, len(parts))], ".")) {
			return true
		}
	}
	return len(dirs) == 0
}

// TestNamesInPagesExist checks that the code has the names that pages quote, such as `ruleset.Port` and `c.Old`, and
// that it has the tests that they name.
func TestNamesInPagesExist(t *testing.T) {
	s, proofs := parse(t), 0
	for _, path := range files(t, ".md") {
		if strings.HasSuffix(path, "CHANGELOG.md") {
			continue // it names what went, too
		}
		for _, m := range quoted.FindAllStringSubmatch(text(t, path), -1) {
			if isTest := regexp.MustCompile(`^(Test|Fuzz|Benchmark)[A-Z]\w*$`).MatchString(m[1]); isTest || qualified.MatchString(m[1]) {
				if !s.exists(strings.TrimSuffix(strings.TrimPrefix(m[1], "*"), "()")) {
					t.Errorf("%s: no code has the name %q", path, m[1])
				}
				if isTest {
					proofs++
				}
			}
		}
	}
	if proofs < 20 {
		t.Errorf("the pages name %d tests", proofs)
	}
}

var (
	pageLink = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading  = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	fenced   = regexp.MustCompile("(?s)```.*?```")
)

// anchors returns the anchors of a page's headings, as GitHub makes them.
func anchors(page string) map[string]bool {
	out := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(page, ""), -1) {
		text := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(m[1], "$1")
		text = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(text), "")
		out[strings.ReplaceAll(text, " ", "-")] = true
	}
	return out
}

// TestLinksLeadSomewhere checks the links of pages to files of the tree and their headings.
func TestLinksLeadSomewhere(t *testing.T) {
	for _, path := range files(t, ".md") {
		for _, m := range pageLink.FindAllStringSubmatch(fenced.ReplaceAllString(text(t, path), ""), -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s links to %s, which does not exist", path, m[1])
			} else if anchor != "" && strings.HasSuffix(target, ".md") && !anchors(text(t, target))[anchor] {
				t.Errorf("%s links to %s, which has no such heading", path, m[1])
			}
		}
	}
}
