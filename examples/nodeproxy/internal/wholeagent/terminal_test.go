//go:build linux

package wholeagent

import (
	"fmt"
	"html"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// pty is nodeproxy in a pseudoterminal.
type pty struct {
	*exec.Cmd
	keys *os.File

	mu   sync.Mutex
	text strings.Builder // the output
}

// startPTY runs nodeproxy in a host, in a terminal of a size.
func startPTY(t *testing.T, h *netlab.Host, width, height uint16, args ...string) *pty {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		netlab.Need(t, false, fmt.Sprintf("pseudo-terminals: %v", err))
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	// The ioctl opens the other end without /dev/pts, which may be another instance.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, master.Fd(), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY)
	if errno != 0 {
		t.Fatal(errno)
	}
	fd := int(peer)
	slave := os.NewFile(peer, "pts")
	defer slave.Close()
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}); err != nil {
		t.Fatal(err)
	}
	p := &pty{Cmd: exec.Command("/proc/self/exe", args...), keys: master}
	p.Env = append(os.Environ(), programEnv+"=1")
	p.Stdin, p.Stdout, p.Stderr = slave, slave, slave
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := h.Start(p.Cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Process.Kill() })
	go func() {
		for buf := make([]byte, 4096); ; {
			n, err := master.Read(buf)
			if err != nil {
				return
			}
			p.mu.Lock()
			p.text.Write(buf[:n])
			p.mu.Unlock()
		}
	}()
	return p
}

// frame returns the last whole frame on the screen, with its colors, or "" before the first
// one.
func (p *pty) frame() string {
	const home, rest = "\x1b[H", "\x1b[J"
	p.mu.Lock()
	defer p.mu.Unlock()
	text := p.text.String()
	end := strings.LastIndex(text, rest)
	if end < 0 {
		return ""
	}
	start := strings.LastIndex(text[:end], home)
	return strings.ReplaceAll(strings.ReplaceAll(text[start+len(home):end], "\x1b[K", ""), "\r\n", "\n")
}

// sgr has the SVG attributes of the text styles that the program uses.
var sgr = map[string]string{
	"1": `font-weight="700"`, "2": `fill="#8b949e"`, "31": `fill="#ff7b72"`, "33": `fill="#e3b341"`, "36": `fill="#79c0ff"`, "7": `fill="#0d1117"`,
}

// screenSVG returns a picture of a frame.
func screenSVG(t *testing.T, title, frame string, width int) string {
	t.Helper()
	const cell, line, border, bar = 8.43, 20, 16, 30
	lines := strings.Split(strings.TrimRight(frame, "\n"), "\n")
	w, h := float64(width)*cell+2*border, float64(len(lines)*line+2*border+bar)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14">`+"\n", w, h, w, h)
	fmt.Fprintf(&b, "<title>%s</title>\n", html.EscapeString(title))
	fmt.Fprintf(&b, `<rect x="0.5" y="0.5" width="%.0f" height="%.0f" rx="8" fill="#0d1117" stroke="#3d444d"/>`+"\n", w-1, h-1)
	fmt.Fprintf(&b, `<text x="%.1f" y="24" fill="#8b949e" text-anchor="middle" font-size="13">%s</text>`+"\n", w/2, html.EscapeString(title))
	for i, l := range lines {
		y := float64(border + bar + i*line)
		look, column := "", 0
		for l != "" {
			if rest, ok := strings.CutPrefix(l, "\x1b["); ok {
				code, after, ok := strings.Cut(rest, "m")
				if !ok {
					t.Fatalf("escape sequence in %q", l)
				}
				if look, l = sgr[code], after; look == "" && code != "0" {
					t.Fatalf("unknown style %q", code)
				}
				continue
			}
			end := strings.Index(l, "\x1b[")
			if end < 0 {
				end = len(l)
			}
			text, n := l[:end], len([]rune(l[:end]))
			l = l[end:]
			x := border + float64(column)*cell
			column += n
			if look == sgr["7"] {
				fmt.Fprintf(&b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%d" fill="#adbac7"/>`+"\n", x, y, float64(n)*cell, line)
			}
			if strings.TrimSpace(text) == "" {
				continue
			}
			attr := look
			if !strings.Contains(attr, "fill=") {
				attr = strings.TrimSpace(attr + ` fill="#e6edf3"`)
			}
			fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" textLength="%.1f" lengthAdjust="spacingAndGlyphs" xml:space="preserve" %s>%s</text>`+"\n", x, y+15, float64(n)*cell, attr, html.EscapeString(text))
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}
