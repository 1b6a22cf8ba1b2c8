package api

import (
	"fmt"
	"go/ast"
	"go/token"
	"regexp"
	"strings"
)

// thing is something exported, with its doc comment.
type thing struct {
	// name is "Name" or "Name.Member".
	name string
	pos  token.Pos
	doc  string
	kind kind
	// fn is the type of a function or method, typ that of a field or type.
	fn  *ast.FuncType
	typ ast.Expr
	// receiver is a method's.
	receiver ast.Expr
}

type kind int

const (
	aFunc kind = iota
	aMethod
	aType
	aValue
	aField
	anInterfaceMethod
)

// things returns everything exported by a package, but for members of what is not.
func things(p Package) []thing {
	var out []thing
	for _, f := range p.Files {
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil && d.Name.IsExported() {
					out = append(out, thing{name: d.Name.Name, pos: d.Pos(), doc: d.Doc.Text(), kind: aFunc, fn: d.Type})
				}
				if d.Recv != nil && d.Name.IsExported() && ast.IsExported(receiverName(d)) {
					out = append(out, thing{name: receiverName(d) + "." + d.Name.Name, pos: d.Pos(), doc: d.Doc.Text(),
						kind: aMethod, fn: d.Type, receiver: d.Recv.List[0].Type})
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					out = append(out, ofSpec(p.Fset, d, s)...)
				}
			}
		}
	}
	return out
}

// ofSpec returns what one type or value specification of a declaration exports.
// The comment of a group stands for its members that have none.
func ofSpec(fset *token.FileSet, d *ast.GenDecl, s ast.Spec) (out []thing) {
	switch s := s.(type) {
	case *ast.ValueSpec:
		doc := s.Doc.Text() + s.Comment.Text()
		if doc == "" {
			doc = d.Doc.Text()
		}
		for _, n := range s.Names {
			if n.IsExported() {
				out = append(out, thing{name: n.Name, pos: n.Pos(), doc: doc, kind: aValue})
			}
		}
	case *ast.TypeSpec:
		if !s.Name.IsExported() {
			return nil
		}
		doc := s.Doc.Text()
		if doc == "" {
			doc = d.Doc.Text()
		}
		out = append(out, thing{name: s.Name.Name, pos: s.Pos(), doc: doc, kind: aType, typ: s.Type})
		switch t := s.Type.(type) {
		case *ast.StructType:
			// above is the last comment; it stands for the fields right below it too whose
			// names it has.
			above := ""
			for i, f := range t.Fields.List {
				doc := f.Doc.Text() + f.Comment.Text()
				if i > 0 && !adjacent(fset, t.Fields.List[i-1], f) {
					above = ""
				}
				if doc != "" {
					above = doc
				}
				for _, n := range f.Names {
					if !n.IsExported() {
						continue
					}
					own := doc
					if own == "" && regexp.MustCompile(`\b`+n.Name+`\b`).MatchString(above) {
						own = above
					}
					out = append(out, thing{name: s.Name.Name + "." + n.Name, pos: n.Pos(), doc: own, kind: aField, typ: f.Type})
				}
			}
		case *ast.InterfaceType:
			for _, m := range t.Methods.List {
				fn, ok := m.Type.(*ast.FuncType)
				if !ok {
					continue
				}
				mdoc := m.Doc.Text() + m.Comment.Text()
				if mdoc == "" && len(t.Methods.List) == 1 {
					mdoc = doc // what is to be said of the one method
				}
				for _, n := range m.Names {
					out = append(out, thing{name: s.Name.Name + "." + n.Name, pos: n.Pos(), doc: mdoc, kind: anInterfaceMethod, fn: fn})
				}
			}
		}
	}
	return out
}

// adjacent reports whether two fields are on lines that follow each other.
func adjacent(fset *token.FileSet, a, b *ast.Field) bool {
	return fset.Position(b.Pos()).Line-fset.Position(a.End()).Line <= 1
}

func receiverName(d *ast.FuncDecl) string {
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

// Deprecated returns what a package has deprecated by a paragraph of its doc
// comment that begins with "Deprecated:", by "Name" or "Name.Member".
func Deprecated(p Package) map[string]bool {
	out := map[string]bool{}
	for _, t := range things(p) {
		for line := range strings.Lines(t.doc) {
			if strings.HasPrefix(line, "Deprecated: ") {
				out[t.name] = true
			}
		}
	}
	return out
}

var (
	// saysZero is how a doc comment tells what the zero value means, or that there is
	// none.
	saysZero = regexp.MustCompile(`(?i)\b(0|zero|nil|none|required|empty|unset|not set|always|never|default)\b|""|\[Default|if not|must`)
	// saysConcurrency is how it tells who may use it at a time.
	saysConcurrency = regexp.MustCompile(`(?i)concurren|goroutine|at a time|at once|immutable|never (be )?changed|must not be (changed|written)|not be copied`)
	// saysErrors is how it tells of errors.
	saysErrors = regexp.MustCompile(`(?i)\berr|fail|\[Err|cannot|calls f\b`)
)

// standard is methods whose meaning everybody knows, by interfaces of the standard
// library.
var standard = map[string]bool{"Error": true, "String": true, "Unwrap": true, "Is": true, "As": true, "Close": true}

// Undocumented returns what is missing in the documentation of a package: that of
// anything exported; what the zero value of a field of a Config or Options means;
// who may use a type with state at a time; and what errors there are.
func Undocumented(p Package) []string {
	var out []string
	say := func(pos token.Pos, format string, args ...any) {
		out = append(out, fmt.Sprintf("%s: %s", p.Fset.Position(pos), fmt.Sprintf(format, args...)))
	}
	hasDoc := false
	for _, f := range p.Files {
		hasDoc = hasDoc || f.Doc.Text() != ""
	}
	if !hasDoc && len(p.Files) != 0 {
		say(p.Files[0].Pos(), "package %s has no documentation", p.Name)
	}
	all := things(p)
	stateful := map[string]bool{} // types with methods that may change them
	for _, t := range all {
		owner, member, _ := strings.Cut(t.name, ".")
		if _, ptr := t.receiver.(*ast.StarExpr); ptr && !standard[member] {
			stateful[owner] = true
		}
	}
	for _, t := range all {
		owner, member, _ := strings.Cut(t.name, ".")
		if strings.TrimSpace(t.doc) == "" {
			say(t.pos, "%s.%s has no doc comment", p.Name, t.name)
			continue
		}
		switch t.kind {
		case aType:
			if st, ok := t.typ.(*ast.StructType); ok && stateful[t.name] && hidden(st) && !saysConcurrency.MatchString(t.doc) {
				say(t.pos, "the doc comment of %s.%s does not say who may use it at a time", p.Name, t.name)
			}
		case aField:
			if (strings.HasSuffix(owner, "Config") || strings.HasSuffix(owner, "Options")) && !saysZero.MatchString(t.doc) {
				if id, ok := t.typ.(*ast.Ident); ok && id.Name == "bool" {
					continue // false is the opposite of what is said
				}
				say(t.pos, "the doc comment of %s.%s does not say what its zero value means", p.Name, t.name)
			}
		case aFunc, aMethod, anInterfaceMethod:
			if returnsError(t.fn) && !standard[member] && !saysErrors.MatchString(t.doc) {
				say(t.pos, "the doc comment of %s.%s says nothing of errors", p.Name, t.name)
			}
		}
	}
	return out
}

// hidden reports whether a struct has fields that are not exported.
func hidden(s *ast.StructType) bool {
	for _, f := range s.Fields.List {
		for _, n := range f.Names {
			if !n.IsExported() {
				return true
			}
		}
	}
	return false
}

func returnsError(f *ast.FuncType) bool {
	if f == nil || f.Results == nil {
		return false
	}
	last := f.Results.List[len(f.Results.List)-1]
	id, ok := last.Type.(*ast.Ident)
	return ok && id.Name == "error"
}
