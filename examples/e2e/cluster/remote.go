package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// remotePort is the port at which a machine listens for commands. No other program listens in the
// machine's own network namespace.
const remotePort = "9"

// request asks a machine to run a command in a node's namespaces.
type request struct {
	Node, Path string
	Args, Env  []string
}

// reply has a piece of a command's output, or is the last reply and has its exit status.
type reply struct {
	Output []byte
	Error  bool // Output is from standard error
	Ended  bool
	Status int
}

// remote is the role of a process in the control plane's namespaces that stands for a command
// in a node of a machine. It has the command's output and exit status, but no standard input.
// After SIGINT or SIGTERM, and after the end of this process, the command receives SIGTERM.
func remote() error {
	conn, err := net.Dial("tcp", net.JoinHostPort(machineIP, remotePort))
	if err != nil {
		return err
	}
	defer conn.Close()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, unix.SIGTERM)
	go func() {
		<-signals
		conn.(*net.TCPConn).CloseWrite()
	}()
	status, err := request{Node: os.Args[1], Path: os.Args[2], Args: os.Args[3:], Env: os.Environ()}.send(conn, os.Stdout, os.Stderr)
	if err == nil {
		os.Exit(status)
	}
	return err
}

// send sends the request, copies the command's output, and returns its exit status.
func (r request) send(conn net.Conn, stdout, stderr io.Writer) (status int, err error) {
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return 0, err
	}
	for replies := json.NewDecoder(conn); ; {
		var r reply
		if err := replies.Decode(&r); err != nil {
			return 0, fmt.Errorf("lost the connection to the machine: %w", err)
		}
		if r.Ended {
			return r.Status, nil
		}
		out := stdout
		if r.Error {
			out = stderr
		}
		if _, err := out.Write(r.Output); err != nil {
			return 0, err
		}
	}
}

// serveRemote runs the commands of role remote. pids has the PIDs of the nodes' process 1.
func serveRemote(l net.Listener, pids map[string]int) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			if err := serveCommand(conn, pids); err != nil {
				fmt.Println("remote command:", err)
			}
		}()
	}
}

// serveCommand runs one command. When the caller has closed its side of the connection,
// serveCommand sends the command SIGTERM, and SIGKILL after 10 s.
func serveCommand(conn net.Conn, pids map[string]int) error {
	requests := json.NewDecoder(conn)
	var r request
	if err := requests.Decode(&r); err != nil {
		return err
	}
	var mu sync.Mutex
	encoder := json.NewEncoder(conn)
	send := func(r reply) error {
		mu.Lock()
		defer mu.Unlock()
		return encoder.Encode(r)
	}
	stream := func(isError bool) io.Writer {
		return writerFunc(func(b []byte) (int, error) { return len(b), send(reply{Output: b, Error: isError}) })
	}
	cmd := &exec.Cmd{
		Path: r.Path, Args: r.Args, Env: r.Env, Stdout: stream(false), Stderr: stream(true),
		WaitDelay: 10 * time.Second, // a process that the command leaves behind may hold its output open
	}
	proc, err := place{name: r.Node, proc: "/proc/" + strconv.Itoa(pids[r.Node])}.start(cmd)
	if err != nil {
		fmt.Fprintln(cmd.Stderr, err)
		return send(reply{Ended: true, Status: 1})
	}
	go func() {
		requests.Decode(new(request)) // returns when the caller has closed its side
		cmd.Process.Signal(unix.SIGTERM)
		select {
		case <-proc.done:
		case <-time.After(10 * time.Second):
			cmd.Process.Kill()
		}
	}()
	<-proc.done
	status := 0
	if proc.err != nil {
		status = 1
		var exit *exec.ExitError
		if errors.As(proc.err, &exit) && exit.Exited() {
			status = exit.ExitCode()
		} else {
			fmt.Fprintln(cmd.Stderr, proc.err)
		}
	}
	return send(reply{Ended: true, Status: status})
}

// writerFunc is a function that implements io.Writer.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
