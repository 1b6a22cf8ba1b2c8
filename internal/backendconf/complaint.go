package backendconf

import (
	"log/slog"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// Complain logs an error about a Service port, once while it stays the same and at a bounded
// rate.
func Complain(l *complaint.Log, level slog.Level, k tracker.Key, message string, err error) {
	o := complaint.Object{Kind: "service", Namespace: k.Namespace, Name: k.Name, Part: k.Port,
		Suffix: "/" + string(k.Protocol) + "/" + k.Family.String()}
	if err == nil {
		l.Write(level, o, message)
		return
	}
	l.Write(level, o, message, "error", err)
}
