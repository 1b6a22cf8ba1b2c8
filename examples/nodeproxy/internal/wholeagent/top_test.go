//go:build linux

package wholeagent

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// newDemoSite returns the demo's network with an agent that serves its manifests, the folder
// of the manifests, and the flags for them.
func newDemoSite(t *testing.T) (*lab.Lab, string, []string) {
	t.Helper()
	d, dir, flags := newDemoNetwork(t)
	embed(t, d.Node, append([]string{"run"}, flags...)...).synced(t, "services=5 endpoints=20 changed=10")
	return d, dir, flags
}

// newDemoNetwork is newDemoSite without an agent.
func newDemoNetwork(t *testing.T) (*lab.Lab, string, []string) {
	t.Helper()
	netlab.Require(t)
	d := must.Get(lab.New())(t)
	t.Cleanup(func() { d.Close() })
	dir := t.TempDir()
	files := must.Get(filepath.Glob("../demo/world/*.yaml"))(t)
	for _, f := range files {
		text := must.Get(os.ReadFile(f))(t)
		put(t, dir, filepath.Base(f), string(text))
	}
	return d, dir, []string{"--manifests", dir, "--hostname-override", "node-1", "--cluster-cidr", "10.1.0.0/16,fd00:10:1::/48", "--min-sync-period", "0s"}
}

// topRows runs top once and returns its rows by name and family.
func topRows(t *testing.T, h *netlab.Host, args ...string) map[string]map[string]any {
	t.Helper()
	code, lines, log := verb(t, h, append([]string{"top", "--once", "-o", "json", "--interval", "100ms"}, args...)...)
	var d struct{ Services []map[string]any }
	if err := json.Unmarshal([]byte(strings.Join(lines, "\n")), &d); err != nil || code != 0 {
		t.Fatalf("exit status %d, error %v, log:\n%s", code, err, log)
	}
	out := map[string]map[string]any{}
	for _, r := range d.Services {
		out[r["service"].(string)+" "+r["family"].(string)] = r
	}
	return out
}

// TestTopCountsRealConnections compares top's output with the connections that were made,
// beside a running agent and without one.
func TestTopCountsRealConnections(t *testing.T) {
	t.Parallel()
	d, _, _ := newDemoSite(t)
	lab.Visits(d.Pod2, "", "10.96.0.10:80", 7)
	for range 3 {
		lab.Visits(d.Pod2, "", "10.96.0.40:80", 1) // has no endpoints
	}
	if c, err := lab.Dial(d.Client, "tcp", lab.StrangerAddr[0], "203.0.113.80:80", lab.NoAnswerTimeout); err == nil {
		c.Close()
	}
	check := func() {
		rows := topRows(t, d.Node)
		for name, want := range map[string]map[string]float64{
			"shop/web IPv4":   {"connections": 7, "ready": 3, "refused": 0, "dropped": 1},
			"shop/web IPv6":   {"connections": 0, "ready": 3, "refused": 0},
			"shop/cart IPv4":  {"connections": 0, "ready": 3},
			"shop/empty IPv4": {"connections": 0, "ready": 0, "refused": 3},
		} {
			for field, n := range want {
				if got, ok := rows[name][field].(float64); !ok || got != n {
					t.Errorf("%s: %s is %v, want %v", name, field, rows[name][field], n)
				}
			}
		}
		if len(rows) != 10 || rows["shop/web IPv4"]["bytesPerSecond"] != nil {
			t.Errorf("%d rows, %v", len(rows), rows["shop/web IPv4"])
		}
	}
	check()
	if rows := topRows(t, d.Node, "--filter", "EMPTY"); len(rows) != 2 {
		t.Errorf("filtered: %v", rows)
	}
	code, lines, _ := verb(t, d.Node, "top", "--once", "--interval", "100ms", "--sort", "refused")
	if code != 0 || len(lines) != 11 || !strings.HasPrefix(lines[1], "shop/empty:http/TCP ") || strings.Fields(lines[1])[5] != "3" {
		t.Errorf("exit status %d, lines\n%s", code, strings.Join(lines, "\n"))
	}
}

// TestTopScreenSortsAndFilters uses top in a terminal with real traffic.
func TestTopScreenSortsAndFilters(t *testing.T) {
	t.Parallel()
	d, _, _ := newDemoSite(t)
	const width, height = 96, 17
	p := startPTY(t, d.Node, width, height, "top", "--interval", "1s")
	const pause = 5 * time.Millisecond
	traffic := lab.StartStream(&lab.Stream{Visit: lab.Visit, Pause: pause}, d.Client, lab.Port("203.0.113.80", "80"), d.Pod1, lab.Port("fd00:10:96::10", "80"))
	more := lab.StartStream(&lab.Stream{Pause: pause, Visit: func(h *netlab.Host, from, to string) (string, string, error) {
		if to == "10.96.0.40:80" {
			lab.Visit(h, from, to) // refused
			return "", "", nil
		}
		return lab.Visit(h, from, to)
	}}, d.Pod2, "10.96.0.30:80", d.Pod2, "10.96.0.40:80")
	defer traffic.Stop()
	defer more.Stop()
	shows := func(what string, parts ...string) string {
		t.Helper()
		frame := ""
		eventually(t, what, func() bool {
			frame = p.frame()
			for _, part := range parts {
				if !strings.Contains(frame, part) {
					return false
				}
			}
			return true
		})
		return frame
	}
	press := func(keys string) {
		t.Helper()
		must.Get(p.keys.WriteString(keys))(t)
	}
	shows("the table is on the screen", "nodeproxy top", "mode nftables, every 1s", "10\x1b[0m Service ports", "sorted by \x1b[36mconnections", "2 have no endpoints", "\x1b[31mshop/empty:http/TCP")
	eventually(t, "the rates are on the screen", func() bool {
		f := strings.Fields(strings.Split(p.frame()+"\n\n\n\n\n", "\n")[4])
		return len(f) == 7 && f[2] != "0"
	})
	for i, l := range strings.Split(p.frame(), "\n") {
		for _, code := range []string{"0", "1", "2", "7", "31", "33", "36"} {
			l = strings.ReplaceAll(l, "\x1b["+code+"m", "")
		}
		if len(l) > width {
			t.Errorf("line %d has %d characters", i, len(l))
		}
	}
	press("n")
	shows("it is sorted by name", "sorted by \x1b[36mname\x1b")
	press("n")
	shows("the order is reversed", "name reversed")
	press("/cart\r")
	if frame := shows("it is filtered", "filter: \x1b[36mcart\x1b[0m"); strings.Contains(frame, "shop/web") {
		t.Errorf("the filter shows\n%s", frame)
	}
	press("\x1b")
	shows("all are shown", "shop/web:http/TCP")
	press("q")
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	eventually(t, "the terminal is restored", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return strings.HasSuffix(p.text.String(), "\x1b[?25h\x1b[?1049l")
	})
}

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
	must.Do(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	// The ioctl opens the other end without /dev/pts, which may be another instance.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, master.Fd(), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY)
	if errno != 0 {
		t.Fatal(errno)
	}
	fd := int(peer)
	slave := os.NewFile(peer, "pts")
	defer slave.Close()
	must.Do(t, unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}))
	p := &pty{Cmd: exec.Command("/proc/self/exe", args...), keys: master}
	p.Env = append(os.Environ(), programEnv+"=1")
	p.Stdin, p.Stdout, p.Stderr = slave, slave, slave
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	must.Do(t, h.Start(p.Cmd))
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
