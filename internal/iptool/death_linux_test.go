package iptool

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestProgramDiesWithAgent kills an agent that waits for a program. The program must die,
// too, so that it does not write after the next agent has taken over.
func TestProgramDiesWithAgent(t *testing.T) {
	netlab.Require(t)
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	// The script keeps the pipe open as long as it lives.
	script := "#!/bin/sh\n[ \"$1\" = --version ] && { echo 'iptables v1.8.9 (nf_tables)'; exit; }\nexec 3>" + pipe + "\necho $$ >&3\nexec sleep 600\n"
	for _, name := range []string{"iptables-nft-restore", "iptables-nft-save"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// Open the pipe for both directions, so that the call does not block, and then for
	// reading alone.
	both, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Open(pipe)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()

	cmd := confine.Command("restore", confine.Limits{})
	cmd.Env = append(cmd.Env, "PATH="+dir+":"+os.Getenv("PATH"))
	ready, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	program.SetReadDeadline(time.Now().Add(time.Minute))
	lines := bufio.NewReader(program)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatalf("the program was not started: %v", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	both.Close()
	if text, err := bufio.NewReader(ready).ReadString('\n'); text != "ready\n" {
		t.Fatalf("the agent wrote %q, %v", text, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	program.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the program did not die: %v", err)
		unix.Kill(pid, unix.SIGKILL)
	}
}

// restoreForever is an agent that waits for a program while other threads start and end. The
// program must not die with those.
func restoreForever() error {
	ns, err := netns.Open(nil)
	if err != nil {
		return err
	}
	defer ns.Close()
	waiting, err := Find(context.Background(), Config{Family: tracker.IPv4, Flavor: "nft", Namespace: ns})
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- waiting.Restore(context.Background(), nil) }()
	time.Sleep(50 * time.Millisecond)
	var threads sync.WaitGroup
	for range 20 {
		threads.Go(func() {
			// The thread ends with the goroutine.
			runtime.LockOSThread()
			time.Sleep(10 * time.Millisecond)
		})
	}
	threads.Wait()
	select {
	case err := <-done:
		return fmt.Errorf("the program has ended: %w", err)
	default:
	}
	fmt.Println("ready")
	return <-done
}
