//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// change replaces the Service old by now. Either may be nil.
type change struct{ old, now *service }

func (c change) id() int {
	if c.now != nil {
		return c.now.id
	}
	return c.old.id
}

// source provides the agent's objects.
type source interface {
	// args returns the agent's arguments for the source.
	args() []string
	// write writes changes of different Services.
	write(ctx context.Context, changes []change) error
	// interrupt makes the source unavailable for the duration.
	interrupt(ctx context.Context, d time.Duration) error
	close()
}

// folder is the source for --manifests: a folder with several Services in each file.
type folder struct {
	dir string
	// text holds the objects of each Service.
	text map[int][]byte
	// files holds the Services of each file.
	files map[int]map[int]bool
}

// perFile is the number of Services in a file. A change of one rewrites the file.
const perFile = 50

func newFolder(dir string) (*folder, error) {
	f := &folder{dir: filepath.Join(dir, "manifests"), text: map[int][]byte{}, files: map[int]map[int]bool{}}
	if err := os.Mkdir(f.dir, 0o755); err != nil {
		return nil, err
	}
	return f, f.put("node.json", []byte(nodeObject+"\n---\n"+serviceCIDRObject))
}

// The objects besides Services and EndpointSlices.
var (
	nodeObject = fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"%s"},"status":{"addresses":[{"type":"InternalIP","address":"%s"},{"type":"InternalIP","address":"%s"}]}}`,
		nodeName, nodeAddresses[0][0], nodeAddresses[1][0])
	serviceCIDRObject = fmt.Sprintf(`{"apiVersion":"networking.k8s.io/v1","kind":"ServiceCIDR","metadata":{"name":"kubernetes"},"spec":{"cidrs":["%s","%s"]}}`,
		serviceCIDRs[0], serviceCIDRs[1])
)

func (f *folder) args() []string { return []string{"--manifests", f.dir} }

func (f *folder) write(_ context.Context, changes []change) error {
	dirty := map[int]bool{}
	for _, c := range changes {
		id := c.id()
		file := id / perFile
		dirty[file] = true
		if f.files[file] == nil {
			f.files[file] = map[int]bool{}
		}
		if c.now == nil {
			delete(f.files[file], id)
			delete(f.text, id)
			continue
		}
		f.files[file][id] = true
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		err := e.Encode(c.now.object())
		for _, es := range c.now.slices() {
			b.WriteString("---\n")
			if err == nil {
				err = e.Encode(es)
			}
		}
		if err != nil {
			return err
		}
		f.text[id] = b.Bytes()
	}
	for _, file := range slices.Sorted(maps.Keys(dirty)) {
		name := fmt.Sprintf("services-%04d.yaml", file)
		if len(f.files[file]) == 0 { // the agent would take an empty file for one that is being written
			if err := os.Remove(filepath.Join(f.dir, name)); err != nil {
				return err
			}
			continue
		}
		var b bytes.Buffer
		for _, id := range slices.Sorted(maps.Keys(f.files[file])) {
			b.WriteString("---\n")
			b.Write(f.text[id])
		}
		if err := f.put(name, b.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

// put replaces a file in one step.
func (f *folder) put(name string, text []byte) error {
	path := filepath.Join(f.dir, name)
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// interrupt renames the folder for a while.
func (f *folder) interrupt(ctx context.Context, d time.Duration) error {
	if err := os.Rename(f.dir, f.dir+".away"); err != nil {
		return err
	}
	sleep(ctx, d)
	return os.Rename(f.dir+".away", f.dir)
}

func (f *folder) close() {}

// sleep waits for the duration or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
