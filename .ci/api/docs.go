package api

import (
	"fmt"
	"go/ast"
	"go/token"
	"regexp"
	"strings"
)

// thing is an exported identifier with its doc comment.
type thing struct {
	// name is "Name" or "Name.Member".
	name string
	pos  token.Pos
	doc  string
	kind kind
	// fn is the type of a function or method, and typ the type of a field or type.
	fn  *ast.FuncType
	typ ast.Expr
	// receiver is the receiver's type of a method.
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

// things returns everything that a package exports, without members of unexported types.
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

// ofSpec returns the exported identifiers of one type or value specification of a
// declaration. The comment of a group applies to members without a comment.
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
			// above is the last comment. It also applies to the fields right below it that
			// it names.
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
					mdoc = doc // the type's comment documents the only method
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

// Deprecated returns the deprecated identifiers of a package, as "Name" or "Name.Member".
// Their doc comments have a paragraph that begins with "Deprecated:".
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
	// documentsZero matches doc comments that document the zero value, or that a value is
	// required.
	documentsZero = regexp.MustCompile(`(?i)\b(0|zero|nil|none|required|empty|unset|not set|always|never|default)\b|""|\[Default|if not|must`)
	// documentsConcurrency matches doc comments that document concurrent use.
	documentsConcurrency = regexp.MustCompile(`(?i)concurren|goroutine|at a time|at once|immutable|never (be )?(changed|modified)|must not be (changed|modified|written)|not be copied`)
	// documentsErrors matches doc comments that document errors.
	documentsErrors = regexp.MustCompile(`(?i)\berr|fail|\[Err|cannot|calls f\b`)
)

// standard holds methods of well-known interfaces of the standard library.
var standard = map[string]bool{"Error": true, "String": true, "Unwrap": true, "Is": true, "As": true, "Close": true}

// Undocumented returns the omissions in the documentation of a package: exported identifiers
// without a doc comment, fields of a Config or Options without the meaning of the zero value,
// types with state without concurrent use, and functions without errors.
func Undocumented(p Package) []string {
	var out []string
	report := func(pos token.Pos, format string, args ...any) {
		out = append(out, fmt.Sprintf("%s: %s", p.Fset.Position(pos), fmt.Sprintf(format, args...)))
	}
	hasDoc := false
	for _, f := range p.Files {
		hasDoc = hasDoc || f.Doc.Text() != ""
	}
	if !hasDoc && len(p.Files) != 0 {
		report(p.Files[0].Pos(), "package %s has no documentation", p.Name)
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
			report(t.pos, "%s.%s has no doc comment", p.Name, t.name)
			continue
		}
		switch t.kind {
		case aType:
			if st, ok := t.typ.(*ast.StructType); ok && stateful[t.name] && hidden(st) && !documentsConcurrency.MatchString(t.doc) {
				report(t.pos, "the doc comment of %s.%s does not document concurrent use", p.Name, t.name)
			}
		case aField:
			if (strings.HasSuffix(owner, "Config") || strings.HasSuffix(owner, "Options")) && !documentsZero.MatchString(t.doc) {
				if id, ok := t.typ.(*ast.Ident); ok && id.Name == "bool" {
					continue // false is the opposite of the comment
				}
				report(t.pos, "the doc comment of %s.%s does not document the zero value", p.Name, t.name)
			}
		case aFunc, aMethod, anInterfaceMethod:
			if returnsError(t.fn) && !standard[member] && !documentsErrors.MatchString(t.doc) {
				report(t.pos, "the doc comment of %s.%s does not document errors", p.Name, t.name)
			}
		}
	}
	return out
}

// hidden reports whether a struct has unexported fields.
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
