package program

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/internal/testing/must"
)

// output runs a command line and returns the exit status, standard output and standard error.
func output(t *testing.T, args ...string) (code int, out, diag string) {
	t.Helper()
	var o, d strings.Builder
	code = Dispatch(t.Context(), &cli.Program{Out: &o, Diag: &d}, args)
	return code, o.String(), d.String()
}

// titles returns the titles of a help text.
func titles(text string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^(Flags.*|[A-Z].*):$`).FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	return all
}

func TestHelpShowsAVerbsOwnFlagsFirst(t *testing.T) {
	for verb, own := range map[string]string{"top": "--interval", "trace": "--by", "explain": "--all"} {
		if verb == "trace" && runtime.GOOS != "linux" {
			continue
		}
		code, text, diag := output(t, verb, "--help")
		if code != 0 || diag != "" {
			t.Fatalf("%s --help: exit status %d, standard error:\n%s", verb, code, diag)
		}
		all := titles(text)
		if all[0] != "Flags, "+verb+"'s own" || all[1] != "Flags, nodeproxy's own" || all[len(all)-1] != "Flags, logging" {
			t.Errorf("%s --help: titles are %q", verb, all)
		}
		first := text[strings.Index(text, all[0]):strings.Index(text, all[1])]
		if !strings.Contains(first, own) || strings.Contains(first, "--proxy-mode") {
			t.Errorf("%s --help: the first flags are\n%s", verb, first)
		}
	}
	_, text, _ := output(t, "run", "--help")
	all := titles(text)
	if first := text[strings.Index(text, all[0]):strings.Index(text, all[1])]; all[0] != "Flags, nodeproxy's own" || !strings.Contains(first, "--help") ||
		!strings.HasPrefix(all[1], "Flags, from kube-proxy") {
		t.Errorf("run --help: titles are %q, the first flags\n%s", all, first)
	}
}

// TestEveryFlagIsInOneGroup compares what --help prints with the flags.
func TestEveryFlagIsInOneGroup(t *testing.T) {
	root := newRoot(&cli.Program{})
	for _, c := range root.Commands() {
		_, text, _ := output(t, c.Name(), "--help")
		c.Flags().VisitAll(func(f *pflag.Flag) {
			want := 1
			if f.Deprecated != "" {
				want = 0
			}
			if got := len(regexp.MustCompile(`(?m)^ {2,6}(-., )?--`+f.Name+`( |\[|$)`).FindAllString(text, -1)); got != want {
				t.Errorf("%s --help shows --%s %d times, not %d", c.Name(), f.Name, got, want)
			}
		})
	}
}

var update = flag.Bool("update", false, "write the table of OPTIONS.md")

// TestOptionsPageFollowsTheFlags compares the tables of OPTIONS.md with the flags of run: nodeproxy's own, and those of
// kube-proxy whose description is longer than what --help prints.
func TestOptionsPageFollowsTheFlags(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the page has the flags of Linux")
	}
	const page, begin, end = "../../deploy/OPTIONS.md", "<!-- begin of the flags -->\n", "<!-- end of the flags -->\n"
	var table strings.Builder
	title := ""
	run, _, err := newRoot(&cli.Program{}).Find([]string{"run"})
	if err != nil {
		t.Fatal(err)
	}
	run.Flags().VisitAll(func(f *pflag.Flag) {
		group := f.Annotations[config.GroupAnnotation]
		if f.Hidden || f.Deprecated != "" || len(group) == 0 || group[0] == "logging" {
			return // logging is Kubernetes' own
		}
		whose, _, _ := strings.Cut(group[0], ":")
		value, usage := pflag.UnquoteUsage(f)
		if whose == "from kube-proxy" && !strings.Contains(usage, "; ") && !strings.Contains(usage, ". ") {
			return
		}
		if whose != title {
			title = whose
			fmt.Fprintf(&table, "\n## Flags, %s\n\n| flag | meaning |\n|---|---|\n", title)
		}
		if usage = strings.ReplaceAll(usage, "|", "\\|"); f.DefValue != "" && f.DefValue != "false" && f.DefValue != "[]" {
			usage += " (default " + f.DefValue + ")"
		}
		fmt.Fprintf(&table, "| `%s` | %s |\n", strings.TrimSpace("--"+f.Name+" "+value), usage)
	})
	text := must.Get(os.ReadFile(page))(t)
	head, rest, _ := strings.Cut(string(text), begin)
	_, tail, ok := strings.Cut(rest, end)
	want := head + begin + table.String() + "\n" + end + tail
	switch {
	case !ok:
		t.Fatalf("%s has no place for the flags", page)
	case *update:
		must.Do(t, os.WriteFile(page, []byte(want), 0o644))
	case string(text) != want:
		t.Errorf("%s differs from the flags: run go test . -args -update", page)
	}
}

func TestFirstFlagMeansRun(t *testing.T) {
	for _, tt := range []struct{ args, want []string }{
		{[]string{"--v=4"}, []string{"run", "--v=4"}},
		{[]string{"--version"}, []string{"version"}},
		{[]string{"--help"}, []string{"--help"}},
		{[]string{"top"}, []string{"top"}},
		{[]string{cobra.ShellCompRequestCmd, "--pro"}, []string{cobra.ShellCompRequestCmd, "run", "--pro"}},
		{[]string{cobra.ShellCompRequestCmd, "to"}, []string{cobra.ShellCompRequestCmd, "to"}},
	} {
		if got := withVerb(&cli.Program{}, tt.args); !slices.Equal(got, tt.want) {
			t.Errorf("%q means %q, want %q", tt.args, got, tt.want)
		}
	}
	if got := withVerb(&cli.Program{AsKubeProxy: true}, nil); !slices.Equal(got, []string{"run"}) {
		t.Errorf("kube-proxy without arguments means %q", got)
	}
}

func TestMisspeltVerbNamesTheNearest(t *testing.T) {
	code, _, diag := output(t, "explian")
	if code != 2 || !strings.HasPrefix(diag, "nodeproxy: no verb \"explian\"; did you mean explain?\n") {
		t.Errorf("exit status %d, standard error:\n%s", code, diag)
	}
}

func TestShellsCompleteVerbsFlagsAndValues(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if code, text, diag := output(t, "completion", shell); code != 0 || diag != "" || !strings.Contains(text, "__complete") {
			t.Errorf("completion %s: exit status %d, standard error %q, output of %d bytes", shell, code, diag, len(text))
		}
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"ex"}, "explain\t"},
		{[]string{"--service-t"}, "--service-traffic-metrics"},
		{[]string{"run", "--ipvs-sch"}, "--ipvs-scheduler"},
		{[]string{"run", "--proxy-mode", "nf"}, "nftables\n"},
		{[]string{"top", "--sort", "dr"}, "dropped\n"},
		{[]string{"demo", "--proxy-mode", "ip"}, "iptables\n"},
		{[]string{"run", "--kubeconfig", ""}, ":0\n"}, // names of files
		{[]string{"run", "--cluster-cidr", ""}, ":4\n"},
		{[]string{"run", ""}, ":4\n"},
	} {
		if _, text, _ := output(t, append([]string{cobra.ShellCompRequestCmd}, tt.args...)...); !strings.Contains(text, tt.want) {
			t.Errorf("%q completes to\n%s", tt.args, text)
		}
	}
}

func TestManualHasAPageForEachVerb(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man")
	if code, _, diag := output(t, "man", dir); code != 0 {
		t.Fatalf("exit status %d: %s", code, diag)
	}
	for _, c := range newRoot(&cli.Program{}).Commands() {
		if !c.IsAvailableCommand() {
			continue // help
		}
		page, err := os.ReadFile(filepath.Join(dir, "nodeproxy-"+c.Name()+".8"))
		if err != nil {
			t.Error(err)
			continue
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if name := strings.ReplaceAll("--"+f.Name, "-", `\-`); f.Deprecated == "" && !regexp.MustCompile(`(?m)^  (\\-., )?`+regexp.QuoteMeta(name)+`( |$)`).MatchString(string(page)) {
				t.Errorf("the page of %s does not have --%s", c.Name(), f.Name)
			}
		})
		for line := range strings.Lines(string(page)) {
			if strings.HasPrefix(line, ".") && !regexp.MustCompile(`^\.(TH|SH|TP|PP|B|BR|nf|fi)\b`).MatchString(line) || strings.HasPrefix(line, "'") {
				t.Errorf("the page of %s has a line that roff interprets: %s", c.Name(), line)
			}
		}
	}
}
