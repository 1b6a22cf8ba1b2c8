package deploy

import (
	"path/filepath"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// The folders with nodeproxy's manifests, from the folder of this package.
const (
	folder      = "../../examples/nodeproxy/deploy"
	chartFolder = folder + "/chart"
)

// Kustomized returns the objects of a folder as "kubectl kustomize" prints them.
func Kustomized(path string) ([]string, error) {
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), path)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, r := range built.Resources() {
		text, err := r.AsYAML()
		if err != nil {
			return nil, err
		}
		out = append(out, string(text))
	}
	return out, nil
}

// Rendered returns the objects of the chart with values, as YAML, in a namespace. A document may be
// empty.
func Rendered(namespace, values string) ([]string, error) {
	c, err := loader.LoadDir(chartFolder)
	if err != nil {
		return nil, err
	}
	given, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		return nil, err
	}
	all, err := chartutil.ToRenderValues(c, given, chartutil.ReleaseOptions{Name: "nodeproxy", Namespace: namespace, IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	var out []string
	for name, text := range files {
		if filepath.Ext(name) == ".yaml" {
			out = slices.AppendSeq(out, strings.SplitSeq(strings.TrimPrefix(text, "---\n"), "\n---\n"))
		}
	}
	return out, nil
}
