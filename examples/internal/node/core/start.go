package core

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/internal/textfile"
	"github.com/go-proxier/proxier/internal/complaint"
)

func (a *Agent) logStart() {
	c := a.Config
	from := "API server"
	switch {
	case a.options.Source != nil:
		from = "program"
	case c.Manifests != "":
		from = c.Manifests
	}
	addresses := a.Tracker.Node().Addresses
	a.Log.Info("serving", "version", a.options.Version, "mode", c.Mode, "families", fmt.Sprint(a.families), "source", from,
		"config", c.ConfigFile, "node", c.NodeName, "addresses", fmt.Sprint(addresses),
		"nodePortAddresses", fmt.Sprint(c.Effective.NodePortAddresses), "detectLocalMode", c.Effective.DetectLocalMode,
		"clusterCIDR", c.Effective.ClusterCIDR, "masqueradeAll", c.MasqueradeAll,
		"minSyncPeriod", c.MinSyncPeriod, "syncPeriod", c.SyncPeriod,
		"healthz", c.Effective.HealthzBindAddress, "metrics", c.Effective.MetricsBindAddress)
	if a.localhost != nil {
		a.Log.Info("this process serves NodePorts at loopback addresses: connections to them end with it", "families", fmt.Sprint(c.LoopbackFamilies(a.families)))
	}
	if len(addresses) == 0 && c.PrimaryOnly {
		a.Log.Warn("NodePorts are not served yet: the node's addresses are not known")
	}
	for _, f := range a.families {
		if len(c.DetectLocal.CIDRs) != 0 && !c.DetectLocal.Detects(f) {
			a.Log.Warn("--cluster-cidr has no CIDR of a served address family: traffic of pods is not recognized in it", "family", f)
		}
	}
}

// ErrConfigChanged ends an agent whose configuration file changed since it started. Its
// supervisor restarts it.
var ErrConfigChanged = errors.New("configuration file changed: restart needed")

// watchConfig returns ErrConfigChanged when the configuration has changed by its file, or calls Reload. While the file
// is invalid, the agent goes on: one that exits would not start again, and a ConfigMap changes on
// all nodes within a minute.
func (a *Agent) watchConfig(ctx context.Context) error {
	path := a.Config.ConfigFile
	if path == "" {
		return nil
	}
	w, err := manifests.NewWatcher(path)
	if err != nil {
		return err
	}
	defer w.Close()
	was := a.Config.FileText
	for {
		// A missing or unreadable file does not count as a change.
		if now, err := textfile.ReadConfig(path); err == nil && !bytes.Equal(was, now) {
			was = now
			if a.configChanged(now) {
				if a.options.Reload == nil {
					return ErrConfigChanged
				}
				a.options.Reload()
			}
		}
		if err := w.Wait(ctx); err != nil {
			return err
		}
	}
}

// configChanged reports whether the configuration differs with a new content of its file. It logs
// why if it does not.
func (a *Agent) configChanged(text []byte) bool {
	next, err := a.Config.WithFile(text)
	a.metrics.ConfigInvalid(err != nil)
	switch {
	case err != nil:
		a.Log.Error("the changed configuration file is invalid: its previous content stays in effect", "error", err)
		a.nodeEvent(true, reasonConfigInvalid, complaint.Text(err.Error()))
		return false
	case reflect.DeepEqual(next.Effective, a.Config.Effective):
		a.Log.Info("the configuration file changed without effect")
		return false
	}
	return true
}
