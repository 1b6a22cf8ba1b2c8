package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"

	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/tracker"
)

// source provides the objects.
type source interface {
	// node returns this node's Node object at the start, or nil if the source has none. If
	// needCIDRs is set, it waits until the Node has podCIDRs.
	node(ctx context.Context, needCIDRs bool) (*v1.Node, error)
	// follow hands in all objects, marks them as synced in the tracker, and hands in
	// changes until ctx ends. It returns an error only if it cannot continue.
	follow(ctx context.Context, w *world) error
	close()
}

// newSource returns the source that the configuration selects. The client is nil unless
// the source is an API server.
func newSource(cfg *config.Config, log *slog.Logger) (source, *kubeapi.Client, error) {
	if cfg.Manifests != "" {
		s, err := newFiles(cfg, log)
		return s, nil, err
	}
	rc, err := kubeapi.ClientConfig(cfg.Effective.ClientConnection, cfg.Master)
	if err != nil {
		return nil, nil, err
	}
	client, err := kubeapi.NewClient(rc)
	if err != nil {
		return nil, nil, err
	}
	return &apiServer{client: client, cfg: cfg, log: log}, client, nil
}

// files is the source --manifests.
type files struct {
	cfg     *config.Config
	log     *slog.Logger
	reader  *manifests.Reader
	watcher *manifests.Watcher
	first   manifests.Changes
	// locked, if not nil, calls a function that hands in the objects of one change.
	locked func(func())
}

func newFiles(cfg *config.Config, log *slog.Logger) (_ *files, err error) {
	f := &files{cfg: cfg, log: log, reader: manifests.NewReader(cfg.Manifests)}
	// Watch before reading, so that no change goes unnoticed.
	if f.watcher, err = manifests.NewWatcher(cfg.Manifests); err != nil {
		return nil, err
	}
	if f.first, err = f.reader.Read(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

func (f *files) close() { f.watcher.Close() }

func (f *files) node(context.Context, bool) (*v1.Node, error) {
	for _, o := range f.first.Set {
		if n, ok := o.Value.(*v1.Node); ok && n.Name == f.cfg.NodeName {
			return n, nil
		}
	}
	f.log.Info("no Node object of this name in the manifests", "node", f.cfg.NodeName)
	return nil, nil
}

// handInFirst hands in the objects that the files had at the start.
func (f *files) handInFirst(w *world) {
	f.feed(w, f.first)
	f.first = manifests.Changes{}
	w.tracker.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
}

func (f *files) follow(ctx context.Context, w *world) error {
	f.handIn(func() { f.handInFirst(w) })
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
			f.handIn(func() { f.feed(w, c) })
		}
	}
}

// handIn calls feed, which hands in objects that must be synced together.
func (f *files) handIn(feed func()) {
	if f.locked != nil {
		f.locked(feed)
		return
	}
	feed()
}

// feed hands in the objects that changed, and logs the problems.
func (f *files) feed(w *world, c manifests.Changes) {
	for _, p := range c.Problems {
		if errors.Is(p, manifests.ErrNotUsed) {
			f.log.Info("skipped an object of the manifests", "object", p)
		} else {
			f.log.Warn("skipped part of the manifests", "error", p)
		}
	}
	for _, o := range c.Set {
		switch o := o.Value.(type) {
		case *v1.Service:
			w.setService(o)
		case *discovery.EndpointSlice:
			w.setSlice(o)
		case *v1.Node:
			w.setNode(o)
		case *networking.ServiceCIDR:
			w.setServiceCIDR(o)
		}
	}
	for _, ref := range c.Gone {
		switch ref.Kind {
		case manifests.Service:
			w.deleteService(ref.NamespacedName)
		case manifests.EndpointSlice:
			w.deleteSlice(ref.NamespacedName)
		case manifests.Node:
			if ref.Name == f.cfg.NodeName {
				w.nodeGone(true)
			}
		case manifests.ServiceCIDR:
			w.deleteServiceCIDR(ref.Name)
		}
	}
}

// apiServer is the source for an API server.
type apiServer struct {
	client *kubeapi.Client
	cfg    *config.Config
	log    *slog.Logger
}

func (s *apiServer) close() {}

// nodeInterval is how often apiServer.node requests the Node.
const nodeInterval = time.Second

// nodeLogInterval is how often apiServer.node logs that it waits.
const nodeLogInterval = time.Minute

// node returns nil unless podCIDRs are needed: all else of a Node can come later.
func (s *apiServer) node(ctx context.Context, needCIDRs bool) (*v1.Node, error) {
	if !needCIDRs {
		return nil, nil
	}
	var logged time.Time
	for {
		n, err := s.client.Node(ctx, s.cfg.NodeName)
		if err == nil && len(podCIDRs(n)) != 0 {
			return n, nil
		}
		if err == nil {
			err = fmt.Errorf("the Node object %s has no podCIDRs yet", s.cfg.NodeName)
		}
		if time.Since(logged) >= nodeLogInterval {
			s.log.Warn("waiting for the node's podCIDRs", "error", err)
			logged = time.Now()
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(nodeInterval):
		}
	}
}

func (s *apiServer) follow(ctx context.Context, w *world) error {
	gates := map[kubeapi.Source]tracker.Source{
		kubeapi.Services: tracker.Services, kubeapi.Slices: tracker.Slices, kubeapi.Nodes: tracker.Nodes,
	}
	kubeapi.Follow(ctx, s.client, tracker.Selector{}, s.cfg.NodeName, kubeapi.Handler{
		SetService:        w.setService,
		DeleteService:     w.deleteService,
		SetSlice:          w.setSlice,
		DeleteSlice:       w.deleteSlice,
		SetNode:           w.setNode,
		DeleteNode:        func() { w.nodeGone(false) },
		SetServiceCIDR:    w.setServiceCIDR,
		DeleteServiceCIDR: w.deleteServiceCIDR,
		Synced: func(s kubeapi.Source) {
			w.log.Debug("listed", "resource", s)
			if g, ok := gates[s]; ok {
				w.tracker.MarkSynced(g)
			}
		},
	}, s.log)
	return ctx.Err()
}
