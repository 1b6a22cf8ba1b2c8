package api

import (
	"fmt"
	"go/types"
	"slices"
	"strings"
)

// deprecated ends the lines of deprecated identifiers.
const deprecated = " // deprecated"

// Snapshot returns the exported API of packages as sorted lines, one for each feature that a
// caller can rely on. An interface is one line: an added method breaks implementations, as a
// removed method breaks callers.
func Snapshot(pkgs []Package) []string {
	var out []string
	for _, p := range pkgs {
		w := &writer{pkg: p, old: Deprecated(p)}
		scope := p.Types.Scope()
		for _, name := range scope.Names() {
			if obj := scope.Lookup(name); obj.Exported() {
				w.object(obj)
			}
		}
		out = append(out, w.lines...)
	}
	slices.Sort(out)
	return out
}

type writer struct {
	pkg   Package
	old   map[string]bool
	lines []string
}

// line adds a line about a thing, whose name is "Name" or "Name.Member".
func (w *writer) line(thing, format string, args ...any) {
	s := "pkg " + w.pkg.Name + ", " + fmt.Sprintf(format, args...)
	owner, _, _ := strings.Cut(thing, ".")
	if w.old[thing] || w.old[owner] {
		s += deprecated
	}
	w.lines = append(w.lines, s)
}

func (w *writer) typ(t types.Type) string {
	return types.TypeString(unnamed(t), func(p *types.Package) string {
		if p == w.pkg.Types {
			return ""
		}
		return strings.TrimPrefix(p.Path(), module+"/")
	})
}

func (w *writer) signature(f *types.Func) string {
	return strings.TrimPrefix(w.typ(f.Signature()), "func")
}

func (w *writer) object(obj types.Object) {
	name := obj.Name()
	switch o := obj.(type) {
	case *types.Const:
		w.line(name, "const %s %s = %s", name, w.typ(o.Type()), o.Val().ExactString())
	case *types.Var:
		w.line(name, "var %s %s", name, w.typ(o.Type()))
	case *types.Func:
		w.line(name, "func %s%s", name, w.signature(o))
	case *types.TypeName:
		if o.IsAlias() {
			w.line(name, "type %s = %s", name, w.typ(types.Unalias(o.Type())))
			return
		}
		w.named(name, o.Type().(*types.Named))
	}
}

func (w *writer) named(name string, n *types.Named) {
	params := ""
	if tp := n.TypeParams(); tp.Len() != 0 {
		var list []string
		for i := range tp.Len() {
			list = append(list, tp.At(i).Obj().Name()+" "+w.typ(tp.At(i).Constraint()))
		}
		params = "[" + strings.Join(list, ", ") + "]"
	}
	switch u := n.Underlying().(type) {
	case *types.Struct:
		comparable := ""
		if !types.Comparable(n) {
			comparable = ", not comparable"
		}
		w.line(name, "type %s%s struct%s", name, params, comparable)
		for f := range u.Fields() {
			switch {
			case f.Exported() && f.Embedded():
				w.line(name+"."+f.Name(), "type %s struct, embedded %s", name, w.typ(f.Type()))
			case f.Exported():
				w.line(name+"."+f.Name(), "type %s struct, %s %s", name, f.Name(), w.typ(f.Type()))
			}
		}
	default:
		w.line(name, "type %s%s %s", name, params, w.typ(n.Underlying()))
	}
	for m := range n.Methods() {
		if m.Exported() {
			w.line(name+"."+m.Name(), "method (%s) %s%s", w.typ(m.Signature().Recv().Type()), m.Name(), w.signature(m))
		}
	}
}

// unnamed returns a type without the names of parameters and results, which callers do not
// depend on.
func unnamed(t types.Type) types.Type {
	switch t := t.(type) {
	case *types.Signature:
		return types.NewSignatureType(nil, nil, nil, unnamedTuple(t.Params()), unnamedTuple(t.Results()), t.Variadic())
	case *types.Pointer:
		return types.NewPointer(unnamed(t.Elem()))
	case *types.Slice:
		return types.NewSlice(unnamed(t.Elem()))
	case *types.Map:
		return types.NewMap(t.Key(), unnamed(t.Elem()))
	case *types.Interface:
		if t.NumMethods() == 0 || t.NumEmbeddeds() != 0 {
			return t
		}
		var methods []*types.Func
		for m := range t.ExplicitMethods() {
			methods = append(methods, types.NewFunc(m.Pos(), m.Pkg(), m.Name(), unnamed(m.Signature()).(*types.Signature)))
		}
		return types.NewInterfaceType(methods, nil).Complete()
	}
	return t
}

func unnamedTuple(t *types.Tuple) *types.Tuple {
	var vars []*types.Var
	for v := range t.Variables() {
		vars = append(vars, types.NewParam(v.Pos(), v.Pkg(), "", unnamed(v.Type())))
	}
	return types.NewTuple(vars...)
}

// Broken returns the lines of the old API that the new one lacks and that were not deprecated.
// Callers may rely on them.
func Broken(before, after []string) []string {
	have := map[string]bool{}
	for _, l := range after {
		have[strings.TrimSuffix(l, deprecated)] = true
	}
	var out []string
	for _, l := range before {
		if l != "" && !strings.HasSuffix(l, deprecated) && !have[l] {
			out = append(out, l)
		}
	}
	return out
}
