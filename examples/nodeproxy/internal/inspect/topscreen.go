package inspect

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// Control sequences of the terminal (ECMA-48, and xterm's private modes).
const (
	screenBegin = "\x1b[?1049h\x1b[?25l\x1b[?7l" // switch to the alternate screen, hide the cursor, cut long lines
	screenEnd   = "\x1b[?7h\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	endOfLine   = "\x1b[K\r\n" // clears the rest of the line
	clearRest   = "\x1b[J"
)

// Colors and styles of text (ECMA-48, SGR).
const (
	normal = "\x1b[0m"
	bold   = "\x1b[1m"
	faint  = "\x1b[2m"
	invert = "\x1b[7m"
	red    = "\x1b[31m"
	yellow = "\x1b[33m"
	cyan   = "\x1b[36m"
)

// screen is the verb top, and what its screen shows besides the rows.
type screen struct {
	view
	mode    string
	every   time.Duration
	typing  bool // the filter
	scroll  int  // rows above the first that is shown
	problem string
}

// live shows the table in a terminal until the user quits or the context ends. It calls read
// at each interval, and shows an error of read until a later call succeeds.
func (s *screen) live(ctx context.Context, in, out *os.File, first sample, read func() (sample, error)) error {
	was, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return err
	}
	defer term.Restore(int(in.Fd()), was)
	defer out.WriteString(screenEnd)
	keys := make(chan []byte)
	go func() { // ends with the program, or with the terminal
		defer close(keys)
		for {
			buf := make([]byte, 64)
			n, err := in.Read(buf)
			if err != nil {
				return
			}
			keys <- buf[:n]
		}
	}()
	tick := time.NewTicker(s.every)
	defer tick.Stop()
	for last, start := first, screenBegin; ; start = "" {
		width, height, err := term.GetSize(int(out.Fd()))
		if err != nil {
			return err
		}
		// Lines are overwritten and not cleared first, so that the screen does not flicker.
		lines := s.frame(s.rows(first, last), max(width, 20), max(height, 6))
		if _, err := out.WriteString(start + home + strings.Join(lines, endOfLine) + clearRest); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			now, err := read()
			if s.problem = ""; err != nil {
				s.problem = err.Error()
				continue
			}
			first, last = last, now
		case pressed, ok := <-keys:
			if !ok || !s.press(pressed) {
				return nil
			}
		}
	}
}

// frame returns the lines of a whole screen.
func (s *screen) frame(rows []row, width, height int) []string {
	total, empty := 0.0, 0
	for _, r := range rows {
		total += max(0, number(r.ConnectionsPerSecond))
		if number(r.Ready) == 0 {
			empty++
		}
	}
	status := "sorted by " + cyan + s.sort
	if s.reversed {
		status += " reversed"
	}
	status += normal
	if empty > 0 {
		status += fmt.Sprintf("   %s%d have no endpoints%s", yellow, empty, normal)
	}
	if s.typing {
		status += "   filter: " + cyan + s.filter + "_" + normal
	} else if s.filter != "" {
		status += "   filter: " + cyan + s.filter + normal
	}
	if s.problem != "" {
		status += "   " + red + s.problem + normal
	}
	table := table(rows, max(16, width-len(strings.Join(table(nil, 0), ""))))
	out := []string{
		fmt.Sprintf("%snodeproxy top%s  mode %s, every %v   %s%d%s Service ports, %s%s%s connections/s", bold, normal, s.mode, s.every, bold, len(rows), normal, bold, short(total), normal),
		status, "", invert + table[0] + normal,
	}
	room := max(1, height-len(out)-1)
	s.scroll = max(0, min(s.scroll, len(rows)-room))
	for i := s.scroll; i < min(len(rows), s.scroll+room); i++ {
		style := ""
		switch r := rows[i]; {
		case r.lost:
			style = red
		case number(r.Ready) == 0:
			style = yellow
		case number(r.ConnectionsPerSecond) == 0:
			style = faint
		}
		out = append(out, style+table[i+1]+normal)
	}
	out = append(out, make([]string, max(0, height-1-len(out)))...)
	return append(out, faint+"sort: c b r e d n   / filter   Esc all   arrows scroll   q quit"+normal)
}

// press handles the keys that were pressed. It returns false if they end the program.
func (s *screen) press(pressed []byte) (more bool) {
	const escape, backspace, del, ctrlC = 27, 8, 127, 3
	for i := 0; i < len(pressed); i++ {
		switch key := pressed[i]; {
		case key == escape && i+2 < len(pressed) && pressed[i+1] == '[':
			i += 2
			s.scroll += map[byte]int{'A': -1, 'B': 1}[pressed[i]]
		case key == escape:
			s.typing, s.filter = false, ""
		case key == ctrlC, key == 'q' && !s.typing:
			return false
		case s.typing && (key == '\r' || key == '\n'):
			s.typing = false
		case s.typing && (key == backspace || key == del):
			s.filter = s.filter[:max(0, len(s.filter)-1)]
		case s.typing && key > ' ' && key < del:
			s.filter += string(key)
		case s.typing:
		case key == '/':
			s.typing, s.filter = true, ""
		default:
			for _, c := range append(columns(), column{name: byName, key: 'n'}) {
				if c.key == key {
					s.reversed = c.name == s.sort && !s.reversed
					s.sort = c.name
				}
			}
		}
	}
	return true
}
