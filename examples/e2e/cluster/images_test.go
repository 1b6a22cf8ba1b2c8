package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// readTar returns the content of a tar archive's files by name. It reports duplicate names
// as errors.
func readTar(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	files := map[string]string{}
	for archive := tar.NewReader(r); ; {
		h, err := archive.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := files[h.Name]; ok {
			t.Errorf("file %s is in the archive twice", h.Name)
		}
		files[h.Name] = string(b)
	}
}

func TestArchiveHoldsImagesOfOneLayer(t *testing.T) {
	s := settings{Dir: t.TempDir(), Version: "v1"}
	for name, content := range map[string]string{"usr/bin/sh": "shell", "usr/share/doc/sh/a": "documentation"} {
		file := filepath.Join(s.rootfs(), name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.writeArchive(t.Context(), "images.tar", []containerImage{
		{[]string{"a:1", "b:1"}, []string{"/agnhost"}, nil}, {[]string{"c:1"}, nil, []string{"sh"}},
	}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(s.imageArchive())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := readTar(t, f)
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal([]byte(files["./manifest.json"]), &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 2 || !slices.Equal(manifest[0].RepoTags, []string{"a:1", "b:1"}) || !slices.Equal(manifest[1].RepoTags, []string{"c:1"}) {
		t.Fatalf("the manifest is %+v", manifest)
	}
	layer := files["./"+manifest[0].Layers[0]]
	for _, m := range manifest {
		config, want := files["./"+m.Config], fmt.Sprintf(`"diff_ids":["sha256:%x"]`, sha256.Sum256([]byte(layer)))
		if !strings.Contains(config, want) || len(m.Layers) != 1 || files["./"+m.Layers[0]] != layer {
			t.Errorf("%v: layers %q and configuration %s, want one layer and %s", m.RepoTags, m.Layers, config, want)
		}
	}
	content := readTar(t, strings.NewReader(layer))
	if content["./usr/bin/sh"] != "shell" {
		t.Errorf("the layer lacks usr/bin/sh: %q", content)
	}
	if _, ok := content["./usr/share/doc/sh/a"]; ok {
		t.Error("the layer has documentation")
	}
}

// The end-to-end test of nodeproxy and the cluster must use the same API server.
func TestVersionIsThatOfTheAPIServerModule(t *testing.T) {
	pin := regexp.MustCompile(`(?m)^\tk8s\.io/kubernetes (\S+)`)
	var versions []string
	for _, file := range []string{"go.mod", "../apiserver/go.mod"} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		m := pin.FindSubmatch(b)
		if m == nil {
			t.Fatalf("%s does not require k8s.io/kubernetes", file)
		}
		versions = append(versions, string(m[1]))
	}
	if versions[0] != versions[1] {
		t.Errorf("this module requires Kubernetes %s, ../apiserver %s", versions[0], versions[1])
	}
}
