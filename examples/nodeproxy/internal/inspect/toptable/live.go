package toptable

import (
	"context"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// Control sequences of the terminal (ECMA-48, and xterm's private modes).
const (
	begin     = "\x1b[?1049h\x1b[?25l" // switch to the alternate screen, hide the cursor
	end       = "\x1b[?25h\x1b[?1049l"
	home      = "\x1b[H"
	clearLine = "\x1b[K"
	clearRest = "\x1b[J"
)

// Live shows the table in a terminal until the user quits or the context ends. It calls read
// at each interval, and shows an error of read until a later call succeeds.
func Live(ctx context.Context, in, out *os.File, mode string, interval time.Duration, view View, first Sample, read func() (Sample, error)) error {
	was, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return err
	}
	defer term.Restore(int(in.Fd()), was)
	if _, err := out.WriteString(begin); err != nil {
		return err
	}
	defer out.WriteString(end)
	keys := make(chan []byte)
	quit := make(chan struct{})
	defer close(quit)
	go func() { // ends with the program, or with the terminal
		for {
			buf := make([]byte, 64)
			n, err := in.Read(buf)
			if err != nil {
				close(keys)
				return
			}
			select {
			case keys <- buf[:n]:
			case <-quit:
				return
			}
		}
	}()
	s := &screen{View: view, mode: mode, every: interval.String()}
	last := first
	tick := time.NewTicker(interval)
	defer tick.Stop()
	resized := time.NewTicker(250 * time.Millisecond)
	defer resized.Stop()
	shown := ""
	for {
		width, height, err := term.GetSize(int(out.Fd()))
		if err != nil {
			return err
		}
		// Lines are overwritten and not cleared first, so that the screen does not flicker.
		var b strings.Builder
		b.WriteString(home)
		for i, line := range s.frame(s.Rows(first, last), max(width, 20), max(height, 6)) {
			if i > 0 {
				b.WriteString("\r\n")
			}
			b.WriteString(line + clearLine)
		}
		b.WriteString(clearRest)
		if text := b.String(); text != shown {
			if _, err := out.WriteString(text); err != nil {
				return err
			}
			shown = text
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			sample, err := read()
			if s.problem = ""; err != nil {
				s.problem = err.Error()
				continue
			}
			first, last = last, sample
		case pressed, ok := <-keys:
			if !ok || !s.key(pressed) {
				return nil
			}
		case <-resized.C:
		}
	}
}
