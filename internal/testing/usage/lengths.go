package usage

import (
	"reflect"
	"unsafe"
)

// Lengths returns the lengths of all maps and slices that are reachable from v, by their
// path of fields, as in "tracker.services.m". The elements of one map or slice have the
// same path element, "[]", and their lengths add up. Lengths does not follow functions and
// interfaces, except v itself.
func Lengths(v any) map[string]int {
	l := lengths{out: map[string]int{}, seen: map[place]bool{}}
	l.add("", reflect.ValueOf(v))
	return l.out
}

type lengths struct {
	out map[string]int
	// seen holds the pointers that were followed.
	seen map[place]bool
}

// place is a pointer's target. A struct and its first field are two places.
type place struct {
	at unsafe.Pointer
	as reflect.Type
}

func (l *lengths) add(path string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		p := place{v.UnsafePointer(), v.Type()}
		if v.IsNil() || l.seen[p] {
			return
		}
		l.seen[p] = true
		l.add(path, v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			l.add(path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Map:
		l.out[path] += v.Len()
		for it := v.MapRange(); it.Next(); {
			l.add(path+"[]", it.Key())
			l.add(path+"[]", it.Value())
		}
	case reflect.Slice:
		l.out[path] += v.Len()
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			l.add(path+"[]", v.Index(i))
		}
	}
}
