package reset

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// serverEnv makes the test binary a pod's server, with the name that it holds.
const serverEnv = "RESET_TEST_SERVER"

func TestMain(m *testing.M) {
	if name := os.Getenv(serverEnv); name != "" {
		fmt.Fprintln(os.Stderr, serve(name))
		os.Exit(1)
	}
	netlab.Main(m)
}

// serve runs a pod's server until it fails.
func serve(name string) error {
	l, err := net.Listen("tcp", "[::]:8080")
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go answer(name, c)
	}
}

// answer answers each request with the pod's name.
func answer(name string, c net.Conn) {
	defer c.Close()
	buf := make([]byte, 64)
	for {
		if _, err := c.Read(buf); err != nil {
			return
		}
		if _, err := c.Write([]byte(name)); err != nil {
			return
		}
	}
}

// inThisProcess serves a pod in the test's process, and inOwnProcess in another one, for more
// connections than one process may have open with both their ends.
func inThisProcess(t *testing.T, h *netlab.Host, name string) {
	h.ServeTCP(t, "[::]:8080", func(c net.Conn) { answer(name, c) })
}

func inOwnProcess(t *testing.T, h *netlab.Host, name string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), serverEnv+"="+name)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = h.Start(cmd)
	}
	if err == nil {
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		_, err = bufio.NewReader(out).ReadString('\n')
	}
	if err != nil {
		t.Fatal(err)
	}
}
