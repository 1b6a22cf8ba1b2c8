package objects

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/tracker"
)

// Need returns an error that names what a Node object lacks.
type Need func(*v1.Node) error

// NeedOf returns what the configuration needs to know of the Node at the start, or nil.
func NeedOf(cfg *config.Config) Need {
	switch {
	case cfg.Effective.DetectLocalMode == config.NodeCIDR:
		return func(n *v1.Node) error {
			if len(podCIDRs(n)) == 0 {
				return fmt.Errorf("the Node object %s has no podCIDRs yet", n.Name)
			}
			return nil
		}
	case cfg.Mode == config.ModeKernelspace && !cfg.BindAddress.IsValid():
		return func(n *v1.Node) error {
			if len(tracker.NodeInfoOf(n).Addresses) == 0 {
				return fmt.Errorf("the Node object %s has no address yet", n.Name)
			}
			return nil
		}
	}
	return nil
}

// Source provides the objects.
type Source interface {
	// Node returns this node's Node object at the start, or nil if the source has none. If need
	// is not nil, it waits until need returns nil for the Node.
	Node(ctx context.Context, need Need) (*v1.Node, error)
	// Follow hands in all objects, marks them as synced in the tracker, and hands in
	// changes until ctx ends. It returns an error only if it cannot continue.
	Follow(ctx context.Context, w *World) error
	Close()
}

// NewSource returns the source that the configuration selects. The client that it returns is nil unless
// the source is an API server. client, if not nil, is the API server.
func NewSource(cfg *config.Config, client *kubeapi.Client, log *slog.Logger) (Source, *kubeapi.Client, error) {
	api := &apiServer{client: client, cfg: cfg, log: log, close: func() {}}
	switch {
	case client != nil:
		return api, client, nil
	case cfg.Manifests != "":
		s, err := newFiles(cfg, log)
		return s, nil, err
	}
	rc, err := kubeapi.ClientConfig(cfg.Effective.ClientConnection, cfg.Master)
	if err != nil {
		if cfg.Effective.ClientConnection.Kubeconfig != "" {
			err = fmt.Errorf("--kubeconfig: %w", err)
		}
		return nil, nil, err
	}
	if api.client, err = kubeapi.NewClient(rc); err != nil {
		return nil, nil, err
	}
	api.close = api.client.Close
	return api, api.client, nil
}

// files is the source --manifests.
type files struct {
	cfg     *config.Config
	log     *slog.Logger
	reader  *manifests.Reader
	watcher *manifests.Watcher
	first   manifests.Changes
}

func newFiles(cfg *config.Config, log *slog.Logger) (_ *files, err error) {
	f := &files{cfg: cfg, log: log, reader: manifests.NewReader(cfg.Manifests)}
	// Watch before reading, so that no change goes unnoticed.
	if f.watcher, err = manifests.NewWatcher(cfg.Manifests); err != nil {
		return nil, fmt.Errorf("--manifests: %w", err)
	}
	if f.first, err = f.reader.Read(); err != nil {
		err = fmt.Errorf("--manifests: %w", err)
		f.Close()
		return nil, err
	}
	return f, nil
}

func (f *files) Close() { f.watcher.Close() }

func (f *files) Node(context.Context, Need) (*v1.Node, error) {
	for _, o := range f.first.Set {
		if n, ok := o.Value.(*v1.Node); ok && n.Name == f.cfg.NodeName {
			return n, nil
		}
	}
	f.log.Info("no Node object of this name in the manifests", "node", f.cfg.NodeName)
	return nil, nil
}

// handInFirst hands in the objects that the files had at the start. They are synced when all are
// handed in.
func (f *files) handInFirst(w *World) {
	w.together(func() { f.feed(w, f.first) })
	f.first = manifests.Changes{}
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

func (f *files) Follow(ctx context.Context, w *World) error {
	f.handInFirst(w)
	last := ""
	for {
		if err := f.watcher.Wait(ctx); err != nil {
			return err
		}
		c, err := f.reader.Read()
		if err != nil {
			// The objects that were read before stay in effect.
			if err.Error() != last {
				f.log.Error("cannot read the manifests", "error", err)
			}
			last = err.Error()
			continue
		}
		last = ""
		if c.Any {
			w.together(func() { f.feed(w, c) })
		}
	}
}

// feed hands in the objects that changed, and logs the problems.
func (f *files) feed(w *World, c manifests.Changes) {
	for _, p := range c.Problems {
		if errors.Is(p, manifests.ErrNotUsed) {
			f.log.Info("skipped an object of the manifests", "object", p)
		} else if !w.keepProblems(p) {
			f.log.Warn("skipped part of the manifests", "error", p)
		}
	}
	if !w.keepProblems(c.Reviews...) {
		logProblems(f.log, "an object of the manifests is not as an API server would have it", c.Reviews)
	}
	for _, o := range c.Set {
		switch o := o.Value.(type) {
		case *v1.Service:
			w.SetService(o)
		case *discovery.EndpointSlice:
			w.SetSlice(o)
		case *v1.Node:
			w.SetNode(o)
		case *networking.ServiceCIDR:
			w.SetServiceCIDR(o)
		}
	}
	for _, ref := range c.Gone {
		w.remove(ref)
	}
}

// remove takes away an object of the manifests.
func (w *World) remove(ref manifests.Ref) {
	switch ref.Kind {
	case manifests.Service:
		w.DeleteService(ref.NamespacedName)
	case manifests.EndpointSlice:
		w.DeleteSlice(ref.NamespacedName)
	case manifests.Node:
		if ref.Name == w.Config.NodeName {
			w.discardNode()
		}
	case manifests.ServiceCIDR:
		w.DeleteServiceCIDR(ref.Name)
	}
}

// maxProblems is the number of lines of logProblems, for each change of the manifests.
const maxProblems = 20

func logProblems(log *slog.Logger, message string, all []*manifests.Problem) {
	for _, p := range all[:min(len(all), maxProblems)] {
		log.Warn(message, "object", p)
	}
	if n := len(all) - maxProblems; n > 0 {
		log.Warn(message+": more of them", "objects", n)
	}
}

// LeaveOutRefused takes away the objects of the manifests that an API server would refuse, for a world that keeps
// objects. It logs them, and the parts of the manifests that cannot be read.
func (w *World) LeaveOutRefused() {
	var out []*manifests.Problem
	for _, p := range w.Problems() {
		if p.Refused || p.Ref.Name == "" {
			out = append(out, p)
			w.remove(p.Ref)
		}
	}
	logProblems(w.Log, "left out an object of the manifests", out)
}

type apiServer struct {
	client *kubeapi.Client
	cfg    *config.Config
	log    *slog.Logger
	close  func()
}

func (s *apiServer) Close() { s.close() }

// nodeInterval is how often apiServer.node requests the Node.
const nodeInterval = time.Second

// nodeLogInterval is how often apiServer.node logs that it waits.
const nodeLogInterval = time.Minute

// Node returns nil without a need: everything else of a Node can come later.
func (s *apiServer) Node(ctx context.Context, need Need) (*v1.Node, error) {
	if need == nil {
		return nil, nil
	}
	var logged time.Time
	var why error
	for {
		n, err := s.client.Node(ctx, s.cfg.NodeName)
		answered := err == nil || apierrors.ReasonForError(err) != metav1.StatusReasonUnknown
		if err == nil {
			err = need(n)
		}
		if err == nil {
			return n, nil
		}
		if answered || why == nil { // the end of ctx is no reason
			why = err
		}
		if time.Since(logged) >= nodeLogInterval {
			s.log.Warn("waiting for the Node object", "error", err)
			logged = time.Now()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ctx.Err(), why)
		case <-time.After(nodeInterval):
		}
	}
}

func (s *apiServer) Follow(ctx context.Context, w *World) error {
	return w.Follow(ctx, s.client, Informers{})
}
