package fake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// ErrFull is the error of adding to a set that has its largest number of elements.
var ErrFull = errors.New("the set is full")

func (k *Kernel) ipset(args []string) (out []string, err error) {
	exist := slices.Contains(args, "-exist")
	switch args[0] {
	case "save":
		for _, name := range slices.Sorted(maps.Keys(k.Sets)) {
			if len(args) == 1 || args[1] == name {
				out = append(out, k.Sets[name].save(name)...)
			}
		}
		return out, nil
	case "flush":
		for _, s := range k.Sets {
			clear(s.Elements)
		}
		return nil, nil
	}
	if len(args) < 2 {
		return nil, errUnknown
	}
	s := k.Sets[args[1]]
	switch {
	case args[0] == "create" && len(args) > 2:
		return nil, k.create(args, exist)
	case s == nil:
		return nil, syscall.ENOENT
	case args[0] == "destroy":
		return nil, k.Destroy(args[1])
	case len(args) < 3:
		return nil, errUnknown
	case args[0] == "swap":
		k.Sets[args[1]], k.Sets[args[2]] = k.Sets[args[2]], s
		return nil, nil
	}
	e, err := parseElement(s.Type, args[2])
	if err != nil {
		return nil, err
	}
	_, have := s.Elements[e]
	switch {
	case args[0] == "add" && have && !exist:
		return nil, syscall.EEXIST
	case args[0] == "add":
		var mark uint64
		if text := option(args, "skbmark"); text != "" {
			if mark, err = strconv.ParseUint(text, 0, 32); err == nil && !s.Skbinfo {
				err = syscall.EINVAL
			}
		}
		if err != nil {
			return nil, err
		}
		return nil, s.Add(e, uint32(mark))
	case args[0] == "del" && (have || exist):
		delete(s.Elements, e)
	case args[0] == "del":
		return nil, syscall.ENOENT
	default:
		return nil, errUnknown
	}
	return nil, nil
}

func (k *Kernel) create(args []string, exist bool) error {
	if have := k.Sets[args[1]]; have != nil {
		if exist && have.Type == args[2] {
			return nil
		}
		return syscall.EEXIST
	}
	s := &Set{Type: args[2], Family: tracker.IPv4, Max: 1 << 16, Skbinfo: slices.Contains(args, "skbinfo"), Elements: map[Element]uint32{}}
	if option(args, "family") == "inet6" {
		s.Family = tracker.IPv6
	}
	if m := option(args, "maxelem"); m != "" {
		n, err := strconv.Atoi(m)
		if err != nil {
			return err
		}
		s.Max = n
	}
	k.Sets[args[1]] = s
	return nil
}

// Add adds an element, or gives it the mark. It must be called in [Kernel.Do]. The error is [ErrFull].
func (s *Set) Add(e Element, mark uint32) error {
	if _, ok := s.Elements[e]; !ok && len(s.Elements) >= s.Max {
		return ErrFull
	}
	s.Elements[e] = mark
	return nil
}

// Destroy destroys a set, unless a rule uses it. It must be called in [Kernel.Do]. The error
// is [syscall.EBUSY] if a rule does.
func (k *Kernel) Destroy(name string) error {
	for _, t := range k.Tables {
		var rules bytes.Buffer
		if err := t.Save(context.Background(), "", &rules); err != nil {
			return err
		}
		if bytes.Contains(rules.Bytes(), []byte("-set "+name+" ")) {
			return syscall.EBUSY
		}
	}
	delete(k.Sets, name)
	return nil
}

// save returns what "ipset save" prints.
func (s *Set) save(name string) []string {
	create := "create " + name + " " + s.Type
	family := "inet"
	if s.Family == tracker.IPv6 {
		family = "inet6"
	}
	if s.Type == "bitmap:port" {
		create += " range 0-65535"
	} else {
		create += fmt.Sprintf(" family %s maxelem %d", family, s.Max)
	}
	if s.Skbinfo {
		create += " skbinfo"
	}
	var out []string
	for e, mark := range s.Elements {
		line := "add " + name + " " + s.text(e)
		if mark != 0 {
			line += fmt.Sprintf(" skbmark %#x", mark)
		}
		out = append(out, line)
	}
	slices.Sort(out)
	return append([]string{create}, out...)
}

// text returns an element as ipset prints it.
func (s *Set) text(e Element) string {
	if s.Type == "bitmap:port" {
		return fmt.Sprint(e.Port)
	}
	out := e.Addr.String()
	if e.Protocol != 0 {
		out += fmt.Sprintf(",%s:%d", strings.ToLower(string(inet.ProtocolOf(e.Protocol))), e.Port)
	}
	switch {
	case !e.Other.IsValid():
	case e.Other.IsSingleIP():
		out += "," + e.Other.Addr().String()
	default:
		out += "," + e.Other.String()
	}
	return out
}

// parseElement returns the element of a set that ipset's argument names.
func parseElement(typeName, text string) (e Element, err error) {
	fields := strings.Split(text, ",")
	if typeName == "bitmap:port" {
		port, err := strconv.ParseUint(text, 10, 16)
		e.Port = uint16(port)
		return e, err
	}
	if len(fields) != strings.Count(typeName, ",")+1 {
		return e, fmt.Errorf("element %q of a set of type %s", text, typeName)
	}
	if e.Addr, err = netip.ParseAddr(fields[0]); err != nil || len(fields) == 1 {
		return e, err
	}
	proto, number, _ := strings.Cut(fields[1], ":")
	port, err := strconv.ParseUint(number, 10, 16)
	e.Protocol, e.Port = inet.Protocol(v1.Protocol(strings.ToUpper(proto))), uint16(port)
	if err != nil || len(fields) == 2 {
		return e, err
	}
	if strings.Contains(fields[2], "/") {
		e.Other, err = netip.ParsePrefix(fields[2])
		return e, err
	}
	a, err := netip.ParseAddr(fields[2])
	e.Other = netip.PrefixFrom(a, a.BitLen())
	return e, err
}
