//go:build linux

package backendtest

import (
	"errors"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// Signals sends a signal to the process at the interval, in microseconds, to interrupt system
// calls. stop returns an error if no signal came.
func Signals(interval int64) (stop func() error, err error) {
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGALRM)
	every := unix.Timeval{Usec: interval}
	_, err = unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Interval: every, Value: every})
	return func() error {
		var none error
		select {
		case <-got:
		case <-time.After(testtime.Timeout):
			none = errors.New("there was no signal")
		}
		_, err := unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{})
		signal.Stop(got)
		return errors.Join(err, none)
	}, err
}

// ExhaustFiles opens files until the process cannot open another one. release closes them.
func ExhaustFiles() (release func()) {
	var files []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		files = append(files, f)
	}
	return func() {
		for _, f := range files {
			f.Close()
		}
	}
}
