//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// folder is the agent's folder of manifests. Services and EndpointSlices are in separate files, so
// that the agent meets them one after the other, as from an API server. A file holds the objects of
// several Services, because the agent looks at all files after a change.
type folder struct {
	dir   string
	files [folderFiles]map[int]*service
}

const folderFiles = 256

func newFolder(dir string) (*folder, error) {
	f := &folder{dir: filepath.Join(dir, "manifests")}
	if err := os.Mkdir(f.dir, 0o755); err != nil {
		return nil, err
	}
	for i := range f.files {
		f.files[i] = map[int]*service{}
	}
	return f, errors.Join(
		f.put("node.json", json.RawMessage(fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"%s"},"status":{"addresses":[{"type":"InternalIP","address":"%s"},{"type":"InternalIP","address":"%s"}]}}`,
			nodeName, nodeAddresses[0][0], nodeAddresses[1][0]))),
		f.put("cidr.json", json.RawMessage(fmt.Sprintf(`{"apiVersion":"networking.k8s.io/v1","kind":"ServiceCIDR","metadata":{"name":"kubernetes"},"spec":{"cidrs":["%s","%s"]}}`,
			serviceCIDRs[0], serviceCIDRs[1]))))
}

func (f *folder) write(changes []change) (err error) {
	dirty := map[int]bool{}
	for _, c := range changes {
		id := c.either().id
		dirty[id%folderFiles] = true
		if f.files[id%folderFiles][id] = c.now; c.now == nil {
			delete(f.files[id%folderFiles], id)
		}
	}
	for i := range dirty {
		var services, slices []any
		for _, svc := range f.files[i] {
			services = append(services, svc.object())
			for _, es := range svc.slices() {
				slices = append(slices, es)
			}
		}
		err = errors.Join(err, f.put(fmt.Sprintf("services-%03d.json", i), services...), f.put(fmt.Sprintf("slices-%03d.json", i), slices...))
	}
	return err
}

// put replaces a file in one step. It removes a file without objects: the agent would take an
// empty one for one that is being written.
func (f *folder) put(name string, objects ...any) error {
	path := filepath.Join(f.dir, name)
	if len(objects) == 0 {
		if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	var b bytes.Buffer
	for _, o := range objects {
		b.WriteString("---\n")
		if err := json.NewEncoder(&b).Encode(o); err != nil {
			return err
		}
	}
	if err := os.WriteFile(path+".new", b.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
