//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a running proxy.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	log  *os.File
}

// startProxy starts a proxy in the node's namespace.
func (d *node) startProxy(bin string, args []string, logs, name string) (*process, error) {
	log, err := logFile(logs, name)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(bin, args...), done: make(chan struct{}), log: log}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := d.host.Start(p.cmd); err != nil {
		log.Close()
		return nil, err
	}
	go func() {
		p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %s", filepath.Base(p.cmd.Path), p.cmd.ProcessState)
	default:
		return nil
	}
}

// stop ends the process with SIGTERM, or after five seconds with SIGKILL.
func (p *process) stop() {
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(5 * time.Second):
		p.cmd.Process.Kill()
		<-p.done
	}
	p.log.Close()
}

// spent is the resource usage of a process since its start.
type spent struct {
	cpu     time.Duration // with ended children
	peakMiB float64
	stolen  time.Duration // from all CPUs of the machine since it started
	when    time.Time
}

// userHZ is the number of ticks per second in /proc/PID/stat. It is the same on every
// architecture that Go supports (linux/asm-generic/param.h).
const userHZ = 100

// spent reads the resource usage of the process.
func (p *process) spent() (s spent, err error) {
	s.when = time.Now()
	proc := fmt.Sprintf("/proc/%d", p.cmd.Process.Pid)
	stat, err := os.ReadFile(proc + "/stat")
	if err != nil {
		return s, err
	}
	// Fields from the third on (proc_pid_stat(5)), behind the name.
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) < 15 {
		return s, errors.New(proc + "/stat is too short")
	}
	field := func(n int) uint64 { v, _ := strconv.ParseUint(f[n-3], 10, 64); return v }
	// The CPU clock of another process (linux/posix-timers.h, CPUCLOCK_SCHED).
	var own unix.Timespec
	if err := unix.ClockGettime(int32(^p.cmd.Process.Pid<<3|2), &own); err != nil {
		return s, os.NewSyscallError("clock_gettime", err)
	}
	s.cpu = time.Duration(own.Nano()) + time.Duration(field(16)+field(17))*time.Second/userHZ
	s.stolen = stolen()
	s.peakMiB = float64(status(proc+"/status", "VmHWM")) / 1024
	return s, nil
}

// stolen returns the time since the machine's start in which the hypervisor let other guests run
// although this machine had work (proc_stat(5)). It is 0 if the hypervisor does not report it.
func stolen() time.Duration {
	text, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(text), "\n")
	f := strings.Fields(line)
	if len(f) < 9 || f[0] != "cpu" {
		return 0
	}
	ticks, _ := strconv.ParseInt(f[8], 10, 64)
	return time.Duration(ticks) * time.Second / userHZ
}

// status returns a number in /proc/PID/status, or 0.
func status(file, field string) uint64 {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, _ := strconv.ParseUint(strings.Fields(rest)[0], 10, 64)
			return n
		}
	}
	return 0
}

// resetPeak begins a new measurement of the peak memory.
func (p *process) resetPeak() {
	os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.cmd.Process.Pid), []byte("5"), 0)
}

// since returns the usage since an earlier reading, and the new reading.
func (p *process) since(before spent) (Usage, spent, error) {
	now, err := p.spent()
	u := Usage{CPUSeconds: (now.cpu - before.cpu).Seconds(), PeakMiB: now.peakMiB}
	if length := now.when.Sub(before.when); length > 0 {
		u.Stolen = (now.stolen - before.stolen).Seconds() / length.Seconds() / float64(runtime.NumCPU())
	}
	return u, now, err
}
