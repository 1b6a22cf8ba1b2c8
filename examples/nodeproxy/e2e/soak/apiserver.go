//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/controlplane"
	"github.com/go-proxier/proxier/internal/netlab"
)

// apiServer is the source for --kubeconfig: a real API server with a real etcd, on a host
// of its own.
type apiServer struct {
	server *controlplane.Server
	log    *os.File // of both programs
}

const (
	// apiWriters is the number of concurrent requests.
	apiWriters = 16
	// apiTimeout bounds the attempts to write an object.
	apiTimeout = 3 * time.Minute
)

func newAPIServer(ctx context.Context, h *netlab.Host, bin, dir string) (_ *apiServer, err error) {
	programs, err := controlplane.Find(bin, "")
	if err != nil {
		return nil, err
	}
	s := &apiServer{}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.log, err = os.Create(filepath.Join(dir, "apiserver.log")); err != nil {
		return nil, err
	}
	s.server, err = controlplane.Start(ctx, controlplane.Config{
		Host: h, Address: controlAddr, Programs: programs, Dir: dir, ServiceRanges: serviceCIDRs[0] + "," + serviceCIDRs[1],
		EtcdFlags:      []string{"--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"},
		APIServerFlags: []string{"--service-node-port-range", fmt.Sprintf("%d-%d", firstNodePort, lastNodePort)},
		EtcdLog:        s.log, APIServerLog: s.log,
	})
	if err != nil {
		return nil, err
	}
	if err = s.request(ctx, "POST", "/api/v1/nodes", []byte(nodeObject)); err != nil {
		return nil, err
	}
	// The API server creates a Service for itself, and a slice for it a while later.
	return s, s.server.WaitFor(ctx, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes")
}

// retry calls f until it succeeds, for apiTimeout at most.
func (s *apiServer) retry(ctx context.Context, f func() error) error {
	for end := time.Now().Add(apiTimeout); ; sleep(ctx, 100*time.Millisecond) {
		err := f()
		if err == nil || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
	}
}

// request sends a request and ignores the answer.
func (s *apiServer) request(ctx context.Context, method, path string, body []byte) error {
	_, err := s.server.Request(ctx, method, path, body)
	if method == "DELETE" && errors.Is(err, controlplane.ErrNotFound) {
		return nil // the answer to an earlier request was lost
	}
	return err
}

func (s *apiServer) args() []string {
	return []string{"--kubeconfig", s.server.Kubeconfig(), "--kube-api-qps", "50", "--kube-api-burst", "100"}
}

const (
	servicesPath = "/api/v1/namespaces/" + namespace + "/services"
	slicesPath   = "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices"
)

// write writes the objects of each Service in order, several Services at a time.
func (s *apiServer) write(ctx context.Context, changes []change) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	limit := make(chan struct{}, apiWriters)
	for _, c := range changes {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			if err := s.writeOne(ctx, c); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs[:min(len(errs), 5)]...)
}

func (s *apiServer) writeOne(ctx context.Context, c change) error {
	had := map[string][]byte{}
	if c.old != nil {
		had["service"] = encoded(c.old.object())
		for _, es := range c.old.slices() {
			had[es.Name] = encoded(es)
		}
	}
	if c.now != nil {
		o := c.now.object()
		text := encoded(o)
		if !bytes.Equal(text, had["service"]) {
			if err := s.put(ctx, servicesPath, o.Name, c.old != nil, text); err != nil {
				return err
			}
			if len(o.Status.LoadBalancer.Ingress) != 0 {
				if err := s.retry(ctx, func() error { return s.request(ctx, "PUT", servicesPath+"/"+o.Name+"/status", text) }); err != nil {
					return err
				}
			}
		}
		for _, es := range c.now.slices() {
			text := encoded(es)
			if before, ok := had[es.Name]; !bytes.Equal(text, before) {
				if err := s.put(ctx, slicesPath, es.Name, ok, text); err != nil {
					return err
				}
			}
			delete(had, es.Name)
		}
	}
	for name := range had {
		path := slicesPath + "/" + name
		if name == "service" {
			if c.now != nil {
				continue
			}
			path = servicesPath + "/" + c.old.name()
		}
		if err := s.retry(ctx, func() error { return s.request(ctx, "DELETE", path, nil) }); err != nil {
			return err
		}
	}
	return nil
}

// put creates or replaces an object. An API server may have created it before it was killed.
func (s *apiServer) put(ctx context.Context, path, name string, exists bool, text []byte) error {
	return s.retry(ctx, func() error {
		if exists {
			return s.request(ctx, "PUT", path+"/"+name, text)
		}
		err := s.request(ctx, "POST", path, text)
		if err != nil && s.request(ctx, "GET", path+"/"+name, nil) == nil {
			return nil
		}
		return err
	})
}

func encoded(o runtime.Object) []byte {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // all types can be encoded
	}
	return text
}

// interrupt kills the API server and starts it again.
func (s *apiServer) interrupt(ctx context.Context, d time.Duration) error {
	s.server.Kill()
	sleep(ctx, d)
	return s.server.Run(ctx)
}

func (s *apiServer) close() {
	if s.server != nil {
		s.server.Close()
	}
	if s.log != nil {
		s.log.Close()
	}
}
