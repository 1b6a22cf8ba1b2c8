package manifests

import (
	"bytes"
	"regexp"
)

// piece is a part of a file that can be parsed by itself. With small pieces an error affects
// one piece alone, and the cost of reading a changed file depends on the change.
type piece struct {
	text []byte
	// line is the line of the file at which the text begins, from 1.
	line int
	// of is the type of an object that does not hold its own type, such as an item of a
	// ServiceList.
	of typeMeta
}

// document is one YAML document, or JSON values up to the end of the file.
type document struct {
	whole piece
	// items holds the items of whole if that is a List that can be cut by indentation.
	// The items are equivalent to whole unless an alias refers from one item to another.
	items []piece
}

// split cuts a file into its documents without parsing them: a line that begins with "---"
// or "..." ends a YAML document in any context (YAML 1.2.2, section 9.1.2), and cannot occur
// in JSON.
func split(data []byte) []document {
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	var docs []document
	start, startLine := 0, 1
	add := func(end int) {
		p := piece{text: data[start:end], line: startLine}
		// Empty lines at the beginning are cut off, so that a piece that moves keeps its text.
		for len(p.text) > 0 && len(bytes.TrimSpace(lineAt(p.text, 0))) == 0 {
			p.text = p.text[len(lineAt(p.text, 0)):]
			p.line++
		}
		if !blank(p.text) {
			docs = append(docs, document{whole: p, items: listItems(p)})
		}
	}
	line := 0
	for at := 0; at < len(data); {
		line++
		l := lineAt(data, at)
		if isMarker(l) {
			add(at)
			// Text behind the marker on its line belongs to the next document.
			start, startLine = at+3, line
		}
		at += len(l)
	}
	add(len(data))
	return docs
}

// lineAt returns the line that begins at an offset, with its line break.
func lineAt(data []byte, at int) []byte {
	if i := bytes.IndexByte(data[at:], '\n'); i >= 0 {
		return data[at : at+i+1]
	}
	return data[at:]
}

// isMarker reports whether a line is a document marker.
func isMarker(l []byte) bool {
	if !bytes.HasPrefix(l, []byte("---")) && !bytes.HasPrefix(l, []byte("...")) {
		return false
	}
	return len(l) == 3 || bytes.IndexByte([]byte(" \t\r\n"), l[3]) >= 0
}

// blank reports whether text consists of space, comments and directives alone.
func blank(text []byte) bool {
	for l := range bytes.Lines(text) {
		l = bytes.TrimSpace(l)
		if len(l) != 0 && l[0] != '#' && l[0] != '%' {
			return false
		}
	}
	return true
}

var (
	itemsLine = regexp.MustCompile(`^items:[ \t]*(#.*)?\r?\n$`)
	typeLine  = regexp.MustCompile(`^(kind|apiVersion):[ \t]+["']?([\w./]+)["']?[ \t]*(#.*)?\r?\n?$`)
)

// listItems cuts a List in YAML's block style into its items, and returns nil for any other
// text. A dash begins each item, and the item's other lines are indented further.
func listItems(p piece) []piece {
	if !bytes.Contains(p.text, []byte("\nitems:")) && !bytes.HasPrefix(p.text, []byte("items:")) {
		return nil
	}
	var (
		list   typeMeta
		starts []int // offsets of the items
		lines  []int // and their lines
		end    int
		dash   = -1 // indentation of the items
		inside bool
	)
	line := p.line - 1
	for at := 0; at < len(p.text); {
		line++
		l := lineAt(p.text, at)
		trimmed := bytes.TrimLeft(l, " ")
		indent := len(l) - len(trimmed)
		switch {
		case len(bytes.TrimSpace(l)) == 0 || trimmed[0] == '#':
		case inside && isDash(trimmed) && (dash < 0 || indent == dash):
			dash = indent
			starts, lines = append(starts, at), append(lines, line)
		case inside && len(starts) != 0 && indent > dash:
		case indent == 0 && itemsLine.Match(l):
			if inside || len(starts) != 0 {
				return nil // parsing the whole reports the second "items" as an error
			}
			inside = true
			at += len(l)
			continue
		case indent == 0:
			if inside {
				inside, end = false, at
			}
			if m := typeLine.FindSubmatch(l); m != nil {
				if string(m[1]) == "kind" {
					list.Kind = string(m[2])
				} else {
					list.APIVersion = string(m[2])
				}
			}
		case inside:
			return nil // not in block style
		}
		at += len(l)
	}
	if inside {
		end = len(p.text)
	}
	if !list.isList() || len(starts) == 0 {
		return nil
	}
	items := make([]piece, len(starts))
	for i, at := range starts {
		to := end
		if i+1 < len(starts) {
			to = starts[i+1]
		}
		text := bytes.Clone(p.text[at:to])
		text[dash] = ' '
		items[i] = piece{text: text, line: lines[i], of: list.item()}
	}
	return items
}

// isDash reports whether a line, without its indentation, begins an item.
func isDash(l []byte) bool {
	return l[0] == '-' && (len(l) == 1 || bytes.IndexByte([]byte(" \r\n"), l[1]) >= 0)
}
