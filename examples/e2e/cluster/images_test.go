package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
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

func TestImagesOfOneArchiveShareLayers(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"base/usr/bin/sh":         "shell",
		"base/usr/share/doc/sh/a": "documentation",
		"more/agnhost":            "program",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	base, more, archive := filepath.Join(dir, "base"), filepath.Join(dir, "more"), filepath.Join(dir, "images")
	if err := writeArchive(context.Background(), archive, t.TempDir(), []containerImage{
		{[]string{"a:1", "b:1"}, []string{base, more}, []string{"/agnhost"}, nil},
		{[]string{"c:1"}, []string{base}, nil, []string{"sh"}},
	}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := readTar(t, f)
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal([]byte(files["manifest.json"]), &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 2 || !slices.Equal(manifest[0].RepoTags, []string{"a:1", "b:1"}) || !slices.Equal(manifest[1].RepoTags, []string{"c:1"}) {
		t.Fatalf("the manifest is %+v", manifest)
	}
	if !slices.Equal(manifest[0].Layers[:1], manifest[1].Layers) {
		t.Errorf("the images' first layers differ: %q and %q", manifest[0].Layers, manifest[1].Layers)
	}
	for _, m := range manifest {
		var config struct {
			RootFS struct {
				DiffIDs []string `json:"diff_ids"`
			} `json:"rootfs"`
		}
		if err := json.Unmarshal([]byte(files[m.Config]), &config); err != nil {
			t.Fatal(err)
		}
		var digests []string
		for _, l := range m.Layers {
			sum := sha256.Sum256([]byte(files[l]))
			digests = append(digests, "sha256:"+hex.EncodeToString(sum[:]))
		}
		if !slices.Equal(config.RootFS.DiffIDs, digests) {
			t.Errorf("%v: diff_ids %q, but the layers' digests are %q", m.RepoTags, config.RootFS.DiffIDs, digests)
		}
	}
	content := readTar(t, bytes.NewReader([]byte(files[manifest[1].Layers[0]])))
	if content["./usr/bin/sh"] != "shell" {
		t.Errorf("the layer lacks usr/bin/sh: %q", content)
	}
	for name := range content {
		if strings.HasPrefix(name, "./usr/share/doc/") && name != "./usr/share/doc/" {
			t.Errorf("the layer has %s", name)
		}
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
