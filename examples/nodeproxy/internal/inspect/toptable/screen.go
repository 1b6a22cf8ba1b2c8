package toptable

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Colors and styles of text (ECMA-48, SGR).
const (
	plain  = "\x1b[0m"
	bold   = "\x1b[1m"
	faint  = "\x1b[2m"
	invert = "\x1b[7m"
	red    = "\x1b[31m"
	yellow = "\x1b[33m"
	cyan   = "\x1b[36m"
)

// screen holds what the screen shows besides the rows.
type screen struct {
	View
	mode    string
	every   string
	typing  bool // the filter
	scroll  int  // rows above the first that is shown
	problem string
}

// frame returns the lines of a whole screen, without the control sequences that place them.
func (s *screen) frame(rows []Row, width, height int) []string {
	const fixed = 6 + 1 + 9 + 1 + 9 + 1 + 6 + 1 + 8 + 1 + 8 + 1
	format := columns(max(16, width-fixed))
	total, empty := 0.0, 0
	for _, r := range rows {
		if r.ConnectionsPerSecond != nil {
			total += *r.ConnectionsPerSecond
		}
		if r.Ready != nil && *r.Ready == 0 {
			empty++
		}
	}
	title := fmt.Sprintf("%snodeproxy top%s  mode %s, every %s   %s%d%s Service ports, %s%s%s connections/s", bold, plain, s.mode, s.every, bold, len(rows), plain, bold, short(total), plain)
	order := s.Sort
	if s.Reversed {
		order += " reversed"
	}
	status := fmt.Sprintf("sorted by %s%s%s", cyan, order, plain)
	if empty > 0 {
		status += fmt.Sprintf("   %s%d have no endpoints%s", yellow, empty, plain)
	}
	switch {
	case s.typing:
		status += fmt.Sprintf("   filter: %s%s_%s", cyan, s.Filter, plain)
	case s.Filter != "":
		status += fmt.Sprintf("   filter: %s%s%s", cyan, s.Filter, plain)
	}
	if s.problem != "" {
		status += "   " + red + s.problem + plain
	}
	out := []string{cut(title, width), cut(status, width), ""}
	out = append(out, invert+cut(fmt.Sprintf(format, header...), width)+plain)
	room := max(1, height-len(out)-1)
	s.scroll = max(0, min(s.scroll, len(rows)-room))
	for _, r := range rows[s.scroll:min(len(rows), s.scroll+room)] {
		line := cut(fmt.Sprintf(format, r.cells()...), width)
		switch {
		case r.refusing || r.dropping:
			line = red + line + plain
		case r.Ready != nil && *r.Ready == 0:
			line = yellow + line + plain
		case r.ConnectionsPerSecond != nil && *r.ConnectionsPerSecond == 0:
			line = faint + line + plain
		}
		out = append(out, line)
	}
	for len(out) < height-1 {
		out = append(out, "")
	}
	return append(out, cut(faint+"sort: c b r e d n   / filter   Esc all   arrows scroll   q quit"+plain, width))
}

// cut shortens a line to a number of characters, not counting escape sequences.
func cut(line string, width int) string {
	var b strings.Builder
	for n := 0; line != ""; {
		if strings.HasPrefix(line, "\x1b[") {
			end := strings.IndexByte(line, 'm') + 1
			b.WriteString(line[:end])
			line = line[end:]
			continue
		}
		_, size := utf8.DecodeRuneInString(line)
		if n < width {
			b.WriteString(line[:size])
		}
		n, line = n+1, line[size:]
	}
	return b.String()
}

// key handles the keys that were pressed. It returns false if they end the program.
func (s *screen) key(pressed []byte) (more bool) {
	const (
		escape, enter, newline, backspace, del, ctrlC = 27, '\r', '\n', 8, 127, 3
	)
	for len(pressed) > 0 {
		switch {
		case len(pressed) >= 3 && pressed[0] == escape && pressed[1] == '[':
			switch pressed[2] {
			case 'A':
				s.scroll--
			case 'B':
				s.scroll++
			}
			pressed = pressed[3:]
			continue
		case pressed[0] == ctrlC:
			return false
		case pressed[0] == escape:
			s.typing, s.Filter = false, ""
		case s.typing && (pressed[0] == enter || pressed[0] == newline):
			s.typing = false
		case s.typing && (pressed[0] == backspace || pressed[0] == del):
			s.Filter = s.Filter[:max(0, len(s.Filter)-1)]
		case s.typing:
			if pressed[0] > ' ' && pressed[0] < del {
				s.Filter += string(pressed[0])
			}
		case pressed[0] == '/':
			s.typing, s.Filter = true, ""
		case pressed[0] == 'q':
			return false
		default:
			if column, ok := keys[pressed[0]]; ok {
				s.Reversed = column == s.Sort && !s.Reversed
				s.Sort = column
			}
		}
		pressed = pressed[1:]
	}
	return true
}
