package cli

import (
	"context"
	"io"
	"log/slog"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/internal/complaint"
)

// processLogger sets up logging for the whole process, including client-go, as kube-proxy
// does for the same configuration, and returns a logger for it. A process can call it once.
// Errors, warnings and infos are logged at any verbosity, debugging messages at 4.
func processLogger(c *logsapi.LoggingConfiguration, gates featuregate.FeatureGate, out, diag io.Writer) (*slog.Logger, error) {
	streams := &logsapi.LoggingOptions{InfoStream: Lines{out}, ErrorStream: Lines{diag}}
	if err := logsapi.ValidateAndApplyWithOptions(c, streams, gates); err != nil {
		return nil, err
	}
	if f := c.Options; !f.Text.SplitStream && !f.JSON.SplitStream {
		// Nothing is buffered, so the flush daemon would only wake the process.
		klog.StopFlushDaemon()
	}
	depth := textDepth
	if c.Format == logsapi.JSONLogFormat {
		depth = 0
	}
	return inFront(klog.Background(), depth), nil
}

// OwnLogger returns a logger in text format with the configuration's verbosity. It shares no
// state with other loggers of the process.
func OwnLogger(c *config.Config, diag io.Writer) *slog.Logger {
	return ownLogger(&c.Effective.Logging, diag)
}

func ownLogger(c *logsapi.LoggingConfiguration, diag io.Writer) *slog.Logger {
	return inFront(textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(Lines{diag}), textlogger.Verbosity(int(c.Verbosity)))), textDepth)
}

// textDepth is the call depth for inFront with a logger in text format: the frames of
// slog.Logger.Info, slog.Logger.log and slog.Handler.Enabled, so that --vmodule matches the
// file of the caller. The JSON format has no --vmodule and takes the caller from slog. With a
// call depth it would report an error, not in JSON, if the stack has fewer frames.
const textDepth = 3

// inFront returns a slog logger that logs to l with a call depth.
func inFront(l logr.Logger, depth int) *slog.Logger {
	return slog.New(logr.ToSlogHandler(l.WithCallDepth(depth)))
}

// Lines writes to W what is written to it, each line as [complaint.Printable] has it but for tabs: the text
// format of logs has values with line breaks as they are.
type Lines struct{ W io.Writer }

// Write implements [io.Writer].
func (l Lines) Write(p []byte) (int, error) {
	rows := strings.Split(string(p), "\n")
	for i, row := range rows {
		cells := strings.Split(row, "\t")
		for j, cell := range cells {
			cells[j] = complaint.Printable(cell)
		}
		rows[i] = strings.Join(cells, "\t")
	}
	_, err := io.WriteString(l.W, strings.Join(rows, "\n"))
	return len(p), err
}

// Quiet returns a logger that leaves out infos, unless the verbosity is more than 0.
func Quiet(c *config.Config, log *slog.Logger) *slog.Logger {
	if c.Effective.Logging.Verbosity > 0 {
		return log
	}
	return slog.New(warnings{log.Handler()})
}

// warnings is a handler for warnings and errors only.
type warnings struct{ slog.Handler }

// Enabled implements [slog.Handler].
func (w warnings) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn && w.Handler.Enabled(ctx, level)
}

// WithAttrs implements [slog.Handler].
func (w warnings) WithAttrs(attrs []slog.Attr) slog.Handler {
	return warnings{w.Handler.WithAttrs(attrs)}
}

// WithGroup implements [slog.Handler].
func (w warnings) WithGroup(name string) slog.Handler { return warnings{w.Handler.WithGroup(name)} }
