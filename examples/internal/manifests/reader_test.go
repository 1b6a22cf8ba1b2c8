package manifests

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/internal/testing/must"
)

// write writes files into a folder, and removes those whose content is "-".
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		name = filepath.Join(dir, name)
		if text == "-" {
			must.Do(t, os.Remove(name))
		} else {
			must.Do(t, os.WriteFile(name, []byte(text), 0o644))
		}
	}
}

// summary returns changes as text, with file names without their folder.
func summary(c Changes, dir string) []string {
	var out []string
	for _, o := range c.Set {
		out = append(out, "set "+o.Ref.String())
	}
	for _, g := range c.Gone {
		out = append(out, "gone "+g.String())
	}
	for _, p := range c.Problems {
		out = append(out, strings.ReplaceAll(p.Error(), dir+"/", ""))
	}
	return out
}

func expect(t *testing.T, r *Reader, any bool, want ...string) Changes {
	t.Helper()
	c := must.Get(r.Read())(t)
	if got := summary(c, r.path); !slices.Equal(got, want) {
		t.Errorf("changes:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if c.Any != any {
		t.Errorf("Any is %v, want %v", c.Any, any)
	}
	return c
}

func svc(name string) string {
	return "apiVersion: v1\nkind: Service\nmetadata:\n  name: " + name + "\nspec:\n  clusterIP: 10.0.0.1\n  ports:\n  - port: 80\n"
}

// indent makes text an item of a YAML list.
func indent(text, with string) string {
	return with + "- " + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+with+"  ") + "\n"
}

func TestEveryFormOfAManifestIsRead(t *testing.T) {
	const slice = `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"s","namespace":"n"}}`
	for _, tt := range []struct {
		name, text string
		want       []string
	}{
		{"empty", "", nil},
		{"only comments", "# nothing\n---\n\n---\n# here\n...\n", nil},
		{"one document", svc("a"), []string{"set Service default/a"}},
		{
			"several", "# first\n" + svc("a") + "---\n---\n" + svc("b") + "--- # third\n" + svc("c") + "...\n" + svc("d"),
			[]string{"set Service default/a", "set Service default/b", "set Service default/c", "set Service default/d"},
		},
		{"text on the marker's line", "--- " + slice + "\n", []string{"set EndpointSlice n/s"}},
		{
			"byte order mark, directive and carriage returns", "\ufeff%YAML 1.2\r\n---\r\n" + strings.ReplaceAll(svc("a"), "\n", "\r\n"),
			[]string{"set Service default/a"},
		},
		{"no line break at the end", strings.TrimSpace(svc("a")), []string{"set Service default/a"}},
		{
			"List as kubectl prints it", "apiVersion: v1\nitems:\n" + indent(svc("a"), "") + indent(svc("b"), "") + "kind: List\nmetadata:\n  resourceVersion: \"\"\n",
			[]string{"set Service default/a", "set Service default/b"},
		},
		{
			"List with indented items", "kind: List\napiVersion: v1\nitems: # here\n\n" + indent(svc("a"), "    ") + "    # next\n" + indent(svc("b"), "    "),
			[]string{"set Service default/a", "set Service default/b"},
		},
		{
			"typed list", "apiVersion: v1\nkind: ServiceList\nitems:\n- metadata:\n    name: a\n-\n  metadata:\n    name: b\n",
			[]string{"set Service default/a", "set Service default/b"},
		},
		{
			"List in flow style", "{kind: List, items: [{apiVersion: v1, kind: Service, metadata: {name: a}}]}",
			[]string{"set Service default/a"},
		},
		{
			"List with items in flow style", "kind: List\nitems: [{apiVersion: v1, kind: Service, metadata: {name: a}}]\n",
			[]string{"set Service default/a"},
		},
		{"empty Lists", "kind: List\nitems: []\n---\nkind: List\nitems:\n---\nkind: ServiceList\napiVersion: v1\n---\n{\"kind\":\"List\",\"items\":null}", nil},
		{
			"anchors between items", "kind: List\nitems:\n- &a\n  apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: &s {type: ClusterIP}\n- {apiVersion: v1, kind: Service, metadata: {name: b}, spec: *s}\n",
			[]string{"set Service default/a", "set Service default/b"},
		},
		{"JSON", slice, []string{"set EndpointSlice n/s"}},
		{
			"JSON values in a row", slice + "\n" + strings.Replace(slice, `"s"`, `"t"`, 1),
			[]string{"set EndpointSlice n/s", "set EndpointSlice n/t"},
		},
		{
			"JSON List", "{\n\t\"items\": [\n\t\t" + slice + "\n\t],\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"List\"\n}\n",
			[]string{"set EndpointSlice n/s"},
		},
		{
			"JSON typed list", `{"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1","items":[{"metadata":{"name":"x"}}]}`,
			[]string{"set EndpointSlice default/x"},
		},
		{"every kind", `
{apiVersion: v1, kind: Node, metadata: {name: n1, namespace: ignored}}
---
{apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: c}}
---
{apiVersion: networking.k8s.io/v1beta1, kind: ServiceCIDR, metadata: {name: d}}
`, []string{"set Node n1", "set ServiceCIDR c", "set ServiceCIDR d"}},

		{
			"other kinds", svc("a") + "---\napiVersion: apps/v1\nkind: Deployment\n---\nkind: EndpointSlice\napiVersion: discovery.k8s.io/v1beta1\n",
			[]string{
				"set Service default/a", "f.yaml:10: apps/v1 Deployment is not used here",
				"f.yaml:13: discovery.k8s.io/v1beta1 EndpointSlice is not used here",
			},
		},
		{
			"bad syntax costs its document", svc("a") + "---\nfoo: [\n---\n" + svc("b"),
			[]string{"set Service default/a", "set Service default/b", "f.yaml:10: yaml: line 1: did not find expected node content"},
		},
		{
			"bad syntax in the middle", svc("a") + "---\nkind: Service\nmetadata:\n  name: b\n  labels: ]\nspec: {}\n",
			[]string{"set Service default/a", "f.yaml:10: yaml: line 3: did not find expected node content"},
		},
		{
			"bad indentation", "kind: Service\nmetadata:\n  name: b\n   labels: {}\n",
			[]string{"f.yaml:1: yaml: line 4: mapping values are not allowed in this context"},
		},
		{
			"a bad key", "kind: Service\nmetadata:\n  name: b\n [\n",
			[]string{"f.yaml:1: yaml: line 3: did not find expected key"},
		},
		{
			"bad syntax costs its List", "kind: List\nitems:\n" + indent(svc("a"), "") + "- foo: bar: baz\n" + indent(svc("b"), ""),
			[]string{"f.yaml:1: yaml: line 11: mapping values are not allowed in this context"},
		},
		{
			"a wrong type costs its item", "kind: List\nitems:\n" + indent(strings.Replace(svc("a"), "80", "http", 1), "") + indent(svc("b"), ""),
			[]string{"set Service default/b", "f.yaml:1: Service a: spec.ports.port must not be a JSON string"},
		},
		{
			"a list for a number", strings.Replace(svc("a"), "80", "[80]", 1),
			[]string{"f.yaml:1: Service a: spec.ports.port must not be a JSON array"},
		},
		{
			"a wrong type in a document", "\n\n" + strings.Replace(svc("a"), "80", "http", 1),
			[]string{"f.yaml:3: Service a: spec.ports.port must not be a JSON string"},
		},
		{
			"a wrong type in JSON", "\n{\n\"apiVersion\":\"v1\",\n\"kind\":\"Service\",\"metadata\":{\n\"name\":5}}",
			[]string{"f.yaml:2: Service: metadata.name must not be a JSON number"},
		},
		{
			"a wrong type in a JSON List", "{\"kind\":\"List\",\"items\":[\n" + slice + ",\n{\"apiVersion\":\"v1\",\n\"kind\":\"Service\",\"metadata\":{\n\"name\":5}}]}",
			[]string{"set EndpointSlice n/s", "f.yaml:1: Service: metadata.name must not be a JSON number"},
		},
		{
			"bad JSON", slice + "\n{\"a\": 1,,}\n",
			[]string{"set EndpointSlice n/s", "f.yaml:1: invalid character ',' looking for beginning of object key string"},
		},
		{"no object", "- 1\n---\nfoo\n---\n[1]\n", []string{"f.yaml:1: is not an object", "f.yaml:3: is not an object", "f.yaml:5: is not an object"}},
		{
			"no kind", "a: b\n---\nkind: Service\n---\napiVersion: v1\nkind: 5\n---\nkind: {}\n",
			[]string{
				"f.yaml:1: has no kind", "f.yaml:3: Service has no apiVersion", "f.yaml:5: kind and apiVersion must be strings",
				"f.yaml:8: kind and apiVersion must be strings",
			},
		},
		{"no name", "apiVersion: v1\nkind: Service\nmetadata:\n  generateName: a-\n", []string{"f.yaml:1: Service has no name"}},
		{"items is no list", "kind: List\nitems: 5\n---\n{\"kind\":\"List\",\n\"items\":5}", []string{
			"f.yaml:1: items of a List is not a list", "f.yaml:4: items of a List is not a list",
		}},
		{"a key twice", svc("a") + "spec: {}\n", []string{`f.yaml:1: yaml: unmarshal errors: line 9: key "spec" already set in map`}},
		{"a key that is no string", "? [a]\n: b\nkind: Service\n", []string{`f.yaml:1: yaml: invalid map key: []interface {}{"a"}`}},
		{
			"a name twice", svc("a") + "---\n" + svc("b") + "---\n" + svc("a"),
			[]string{"set Service default/a", "set Service default/b", "f.yaml:19: Service default/a is already at f.yaml:1"},
		},
		{"an endless alias", "kind: Service\napiVersion: v1\nmetadata: &m\n  labels: *m\n", []string{"f.yaml:1: yaml: anchor 'm' value contains itself"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, map[string]string{"f.yaml": tt.text})
			expect(t, NewReader(dir), true, tt.want...)
		})
	}
}

func TestExpansionOfAliasesIsLimited(t *testing.T) {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n  annotations:\n    l0: &l0 [lol,lol,lol,lol,lol,lol,lol,lol,lol,lol]\n")
	for i := range 30 {
		fmt.Fprintf(&b, "    l%d: &l%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*l%d,", i), 10), ","))
	}
	f := newDocument([]byte(b.String()))
	if len(f.objects) != 0 || len(f.problems) != 1 {
		t.Errorf("%d objects, problems %v", len(f.objects), f.problems)
	}
}

func TestYAMLScalarsHaveTheTypesOfTheAPI(t *testing.T) {
	f := newDocument([]byte(`
apiVersion: "v1"
kind: Service
metadata:
  name: 'a'
  creationTimestamp: 2024-05-06T07:08:09Z
  annotations:
    day: 2024-05-06
    text: |
      two
      lines
    quoted: "80"
    "yes": "yes"
spec: &s
  ports:
  - {port: 0x50, name: web, targetPort: "http"}
  - {port: 53, protocol: UDP, targetPort: 5353}
  publishNotReadyAddresses: true
  externalIPs: ~
  sessionAffinity: ClientIP
`))
	if len(f.problems) != 0 || len(f.objects) != 1 {
		t.Fatalf("problems %v", f.problems)
	}
	s := f.objects[0].Value.(*v1.Service)
	a := s.Annotations
	if s.Namespace != "default" || s.CreationTimestamp.Year() != 2024 ||
		a["day"] != "2024-05-06" || a["text"] != "two\nlines\n" || a["quoted"] != "80" || a["yes"] != "yes" {
		t.Errorf("metadata %+v", s.ObjectMeta)
	}
	p := s.Spec.Ports
	if p[0].Port != 80 || p[0].Protocol != v1.ProtocolTCP || p[0].TargetPort.StrVal != "http" ||
		p[1].Protocol != v1.ProtocolUDP || p[1].TargetPort.IntVal != 5353 || !s.Spec.PublishNotReadyAddresses ||
		*s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != 10800 {
		t.Errorf("spec %+v", s.Spec)
	}

	f = newDocument([]byte(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"s"},"ports":[{"port":80}]}`))
	if len(f.objects) != 1 {
		t.Fatalf("problems %v", f.problems)
	}
	if p := f.objects[0].Value.(*discovery.EndpointSlice).Ports[0]; *p.Name != "" || *p.Protocol != v1.ProtocolTCP {
		t.Errorf("port %+v", p)
	}
}

func TestReadReturnsDifferencesAlone(t *testing.T) {
	dir := t.TempDir()
	r := NewReader(dir)
	expect(t, r, false)
	write(t, dir, map[string]string{"a.yaml": svc("a") + "---\n" + svc("b"), ".hidden.yaml": "[", "notes.txt": "["})
	expect(t, r, true, "set Service default/a", "set Service default/b")
	expect(t, r, false)

	// An object that only moves in the file is unchanged.
	write(t, dir, map[string]string{"a.yaml": "# new\n---\n" + svc("b") + "---\n" + strings.Replace(svc("a"), "80", "81", 1)})
	expect(t, r, true, "set Service default/a")
	write(t, dir, map[string]string{"a.yaml": svc("b") + "---\n" + strings.Replace(svc("a"), "80", "81", 1)})
	expect(t, r, true)

	// A problem is reported once, and again if it was fixed and returns.
	bad := map[string]string{"b.json": `{"kind":`}
	write(t, dir, bad)
	expect(t, r, true, "b.json:1: unexpected EOF")
	write(t, dir, map[string]string{"a.yaml": svc("b")})
	expect(t, r, true, "gone Service default/a")
	write(t, dir, map[string]string{"b.json": "-"})
	expect(t, r, true)
	write(t, dir, bad)
	expect(t, r, true, "b.json:1: unexpected EOF")

	// When the used one of two objects is removed, the other one is used. An equal one is no change.
	other := strings.Replace(svc("b"), "80", "81", 1)
	write(t, dir, map[string]string{"b.json": "-", "c.yml": svc("b") + "---\n" + other})
	expect(t, r, true, "c.yml:1: Service default/b is already at a.yaml:1", "c.yml:10: Service default/b is already at a.yaml:1")
	write(t, dir, map[string]string{"a.yaml": "-"})
	expect(t, r, true, "c.yml:10: Service default/b is already at c.yml:1")
	write(t, dir, map[string]string{"c.yml": other})
	expect(t, r, true, "set Service default/b")

	// An object whose document becomes invalid is removed.
	write(t, dir, map[string]string{"c.yml": svc("c") + "---\n" + svc("d")})
	expect(t, r, true, "set Service default/c", "set Service default/d", "gone Service default/b")
	write(t, dir, map[string]string{"c.yml": svc("c") + "---\n" + strings.Replace(svc("d"), "name:", "nam e", 1)})
	expect(t, r, true, "gone Service default/d", "c.yml:10: Service: metadata must not be a JSON string")
}

func TestMissingPathKeepsObjects(t *testing.T) {
	path := filepath.Join(t.TempDir(), "all")
	r := NewReader(path)
	if _, err := r.Read(); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("error %v", err)
	}
	write(t, filepath.Dir(path), map[string]string{"all": svc("a")})
	expect(t, r, true, "set Service default/a")
	must.Do(t, os.Remove(path))
	if _, err := r.Read(); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("error %v", err)
	}
	write(t, filepath.Dir(path), map[string]string{"all": svc("a")})
	expect(t, r, false)
}

func TestUnreadableFileKeepsItsObjects(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": svc("a"), "b.yaml": svc("b")})
	r := NewReader(dir)
	expect(t, r, true, "set Service default/a", "set Service default/b")
	// Root ignores permissions, but cannot open a loop of links.
	a := filepath.Join(dir, "a.yaml")
	must.Do(t, errors.Join(os.Remove(a), os.Symlink("a.yaml", a)))
	expect(t, r, true, "a.yaml: too many levels of symbolic links")
	expect(t, r, false)
	must.Do(t, os.Remove(a))
	write(t, dir, map[string]string{"a.yaml": svc("a") + "---\n" + svc("c")})
	expect(t, r, true, "set Service default/c")
}

// TestSizeIsBounded adds a file of 8 GB, of which nothing is allocated on the disk, and lets files
// grow beyond the bound together.
func TestSizeIsBounded(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.yaml": svc("a"), "b.yaml": ""})
	r := NewReader(dir)
	b := filepath.Join(dir, "b.yaml")
	must.Do(t, os.Truncate(b, 8<<30))
	const problem = "b.yaml: is too large: all files together may have 512 MiB"
	expect(t, r, true, "set Service default/a", problem)
	expect(t, r, false)
	write(t, dir, map[string]string{"b.yaml": svc("b")})
	expect(t, r, true, "set Service default/b")

	r.room = int64(len(svc("a") + svc("b") + svc("c")))
	write(t, dir, map[string]string{"b.yaml": svc("b") + "---\n" + svc("c")})
	expect(t, r, true, problem)
	write(t, dir, map[string]string{"a.yaml": "-"})
	expect(t, r, true, "set Service default/c", "gone Service default/a")
}

// TestMountedConfigMapIsFollowed makes the steps in which kubelet changes a mounted
// ConfigMap.
func TestMountedConfigMapIsFollowed(t *testing.T) {
	dir := t.TempDir()
	publish := func(version, text string) {
		t.Helper()
		v := filepath.Join(dir, "..v"+version)
		err := errors.Join(
			os.Mkdir(v, 0o755),
			os.WriteFile(filepath.Join(v, "x.yaml"), []byte(text), 0o644),
			os.Symlink("..v"+version, filepath.Join(dir, "..data_tmp")),
			os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
		if err != nil {
			t.Fatal(err)
		}
	}
	publish("1", svc("a"))
	must.Do(t, os.Symlink("..data/x.yaml", filepath.Join(dir, "x.yaml")))
	r := NewReader(dir)
	expect(t, r, true, "set Service default/a")
	publish("2", svc("a")+"---\n"+svc("b"))
	expect(t, r, true, "set Service default/b")
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(svc("a") + "---\n" + svc("b")))
	f.Add([]byte("kind: List\napiVersion: v1\nitems:\n" + indent(svc("a"), "  ") + indent(svc("b"), "  ")))
	f.Add([]byte(`{"kind":"List","items":[{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"}},null,5]}`))
	f.Add([]byte("kind: ServiceList\nitems:\n- &a {<<: [*a], ? [x]: y}\n- .inf\n-\n"))
	f.Add([]byte("--- |\n---\n...\n%YAML\n{"))
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		lines := 1 + strings.Count(string(data), "\n")
		all, seen := parse(data, nil), 0
		for _, p := range all {
			if p.line < 1 || p.line > lines {
				t.Errorf("line %d of %d", p.line, lines)
			}
			for _, o := range p.objects {
				seen++
				if o.Value.GetName() != o.Name || o.Name == "" {
					t.Errorf("%s is called %q", o.Ref, o.Value.GetName())
				}
			}
		}
		// A second parse of the same text must return the same values.
		for i, p := range parse(data, all) {
			if !slices.Equal(p.objects, all[i].objects) {
				t.Errorf("document %d is parsed again", i)
			}
			seen -= len(p.objects)
		}
		if seen != 0 {
			t.Errorf("%d objects more or less", seen)
		}
	})
}

// TestEmptiedFileKeepsItsObjects empties a file, as a shell does before the redirected
// command prints anything, and then writes and removes it.
func TestEmptiedFileKeepsItsObjects(t *testing.T) {
	dir := t.TempDir()
	r := NewReader(dir)
	write(t, dir, map[string]string{"a.yaml": svc("a")})
	expect(t, r, true, "set Service default/a")
	write(t, dir, map[string]string{"a.yaml": "\n"})
	if c := must.Get(r.Read())(t); len(c.Gone) != 0 || len(c.Problems) != 1 {
		t.Errorf("emptied: %+v", c)
	}
	write(t, dir, map[string]string{"a.yaml": svc("a")})
	if c := must.Get(r.Read())(t); len(c.Gone)+len(c.Set)+len(c.Problems) != 0 {
		t.Errorf("written again: %+v", c)
	}
	write(t, dir, map[string]string{"a.yaml": "-"})
	expect(t, r, true, "gone Service default/a")
}
