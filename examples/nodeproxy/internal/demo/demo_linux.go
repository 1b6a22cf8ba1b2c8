package demo

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/go-proxier/proxier/examples/agent/sockets"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/iptables"
)

// worldFiles are the manifests that the demo serves.
//
//go:embed world/*.yaml
var worldFiles embed.FS

// Exit statuses of demo besides 0: an expectation failed, the demo could not begin, and the
// demo was interrupted.
const (
	exitFailed   = 1
	ExitNoSpaces = 3
	// ExitStopped is the status by which shells report SIGINT.
	ExitStopped = 130
)

const demoLong = `Builds a small cluster of network namespaces, serves the manifests that ship with
the program, and sends real connections. It needs no privileges except the right to
create user namespaces, and changes nothing outside of them. The exit status is 0 if
all expectations held, 1 if one failed, 3 if namespaces cannot be created, and 130 if
the demo was interrupted.
`

// Command returns the verb demo.
func Command(p *cli.Program) *cobra.Command {
	c := &cobra.Command{Use: demoUse, Short: demoShort, Long: demoLong}
	flags := c.Flags()
	mode := flags.String("proxy-mode", config.ModeNFTables, "the data plane of node-1: nftables, or iptables, whose programs must be installed")
	sockets := flags.Bool("socket-lb", false, "translate the TCP connections and UDP datagrams of node-1 at the socket, as run --socket-lb does; needs root")
	hold := flags.Bool("hold", false, "keep the cluster at the end, to look around, until interrupted")
	cli.Complete(c, "proxy-mode", config.ModeNFTables, config.ModeIPTables)
	c.RunE = func(c *cobra.Command, args []string) error {
		switch {
		case len(args) != 0:
			return cli.Bad("unexpected argument %q", args[0])
		case *mode != config.ModeNFTables && *mode != config.ModeIPTables:
			return cli.Bad("no demo of proxy mode %q", *mode)
		}
		return cli.StatusError(run(c.Context(), *mode, *sockets, *hold, p.Out, p.Diag))
	}
	return c
}

const needsNamespaces = `The demo needs the right to create user and network namespaces. It may be restricted by
the parameters user.max_user_namespaces, kernel.unprivileged_userns_clone and
kernel.apparmor_restrict_unprivileged_userns, or by a container's seccomp profile. As
root, the demo needs no user namespaces.
`

// run runs the tour, prints the result and returns the exit status.
func run(ctx context.Context, mode string, socketLB, hold bool, out, diag io.Writer) int {
	cannot := func(err error, needs string) int {
		fmt.Fprintf(diag, "nodeproxy demo: %v\n%s", err, needs)
		return ExitNoSpaces
	}
	var c *demoCgroup
	if socketLB {
		// The kernel loads the programs only in the initial user namespace, so the demo creates only network namespaces.
		var err error
		if c, err = newDemoCgroup(ctx); err != nil {
			return cannot(err, needsPrograms)
		}
		defer func() {
			if err := c.close(); err != nil {
				fmt.Fprintf(diag, "nodeproxy demo: %v\n", err)
			}
		}()
	} else if inside, code, err := netlab.Reexec(); err != nil {
		return cannot(err, needsNamespaces)
	} else if !inside {
		return code
	}
	l, err := lab.New()
	if err != nil {
		return cannot(err, needsNamespaces)
	}
	defer l.Close()
	t := &tour{Lab: l, mode: mode, out: out, synced: make(chan string, 100), sockets: c}
	if c != nil {
		for _, h := range []*netlab.Host{t.Node, t.Pod1, t.Pod2} {
			h.Around = c.group.Do
		}
	}
	dir, err := os.MkdirTemp("", "nodeproxy-demo-")
	if err == nil {
		defer os.RemoveAll(dir)
		t.folder = filepath.Join(dir, "world")
		err = t.run(ctx, diag)
	}
	if ctx.Err() != nil {
		t.printf("\nStopped.")
		return ExitStopped
	} else if err != nil {
		fmt.Fprintf(diag, "nodeproxy demo: %v\n", err)
		return exitFailed
	}
	if hold {
		t.printf("\nEverything stays up until you press Ctrl-C. In another terminal:\n%s", t.howToLook())
		<-ctx.Done()
	}
	if t.failed > 0 {
		t.printf("\n%d of %d expectations FAILED", t.failed, t.checked)
		return exitFailed
	}
	t.printf("\nAll %d expectations held.", t.checked)
	return 0
}

// tour is one run of the demo.
type tour struct {
	*lab.Lab
	mode            string
	out             io.Writer
	folder          string // the folder of the manifests
	synced          chan string
	sockets         *demoCgroup // nil without --socket-lb
	checked, failed int
}

func (t *tour) printf(format string, args ...any) { fmt.Fprintf(t.out, format+"\n", args...) }

// expect prints an expectation and whether it held.
func (t *tour) expect(ok bool, format string, args ...any) {
	t.checked++
	verdict := "ok"
	if !ok {
		verdict = "FAILED"
		t.failed++
	}
	t.printf("  %-6s  %s", verdict, fmt.Sprintf(format, args...))
}

// run sets up the cluster and visits the Services.
func (t *tour) run(ctx context.Context, diag io.Writer) (err error) {
	if err := os.CopyFS(filepath.Dir(t.folder), worldFiles); err != nil {
		return err
	}
	t.printf(`node-1 has pod-1 and pod-2, node-2 has pod-3 and pod-4, and a client is outside of
the cluster: each in a network namespace of this process. The tour sends real
connections through the %s rules of node-1, for IPv4 and IPv6.`, t.mode)

	stop, err := t.startAgent(ctx, diag)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	line, err := t.waitSynced(ctx)
	if err != nil {
		return err
	}
	if t.sockets != nil {
		if err := t.sockets.wait(ctx); err != nil {
			return err
		}
	}
	t.printf("\nThe manifests are in effect: %s", line)
	for _, part := range []func(context.Context) error{t.answers, t.silence, t.udp, t.changes} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	t.showRules()
	return nil
}

// startAgent runs the agent of the verb run in the node's namespace. stop ends the agent.
func (t *tour) startAgent(ctx context.Context, diag io.Writer) (stop func() error, err error) {
	// No servers: they would listen in this namespace, not the node's. No parameters: the
	// demo must not change the machine's.
	flags := config.NewFlags("run")
	if err := flags.Parse(append(t.objectFlags(),
		"--sync-period", "1s", "--min-sync-period", "0s",
		"--healthz-bind-address", "", "--metrics-bind-address", "",
		"--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0",
	)); err != nil {
		return nil, err
	}
	cfg, err := cli.Configure(flags, 0)
	if err != nil {
		return nil, err
	}
	if c := t.sockets; c != nil {
		cfg.SocketLB = config.SocketLB{Enabled: true, Cgroup: c.group.Path(), Dir: c.dir}
	}
	// The programs of iptables run from any thread, and without privileges they cannot open
	// the default lock file.
	m := modes.IPTablesWith(func(c *iptables.Config) {
		c.NetNS, c.LockFile = t.Node.File(), filepath.Join(t.folder, "xtables.lock")
	})
	var a *core.Agent
	err = t.Node.Do(func() (err error) {
		a, err = core.New(ctx, core.Options{Config: cfg, Modes: []modes.Mode{modes.NFTables(), m}, Lines: lines(t.synced), Log: cli.Quiet(cfg, cli.OwnLogger(cfg, diag)), Tune: true, SocketLB: sockets.LB()})
		return err
	})
	if err != nil {
		return nil, err
	}
	if t.sockets != nil {
		t.sockets.backend, _ = a.Sockets.(*socketlb.Backend)
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	return func() error { cancel(); return <-ended }, nil
}

// lines is an io.Writer that sends each line to a channel.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- strings.TrimSpace(string(b))
	return len(b), nil
}

// waitSynced returns the agent's line about the next change that is in effect.
func (t *tour) waitSynced(ctx context.Context) (string, error) {
	select {
	case line := <-t.synced:
		return line, nil
	case <-ctx.Done():
		return "", ctx.Err()
	case <-time.After(time.Minute):
		return "", errors.New("no change came into effect for a minute")
	}
}

// edit replaces what a pattern matches in a manifest, waits until the change is in effect, and prints it.
func (t *tour) edit(ctx context.Context, what, file, pattern, text string) error {
	path := filepath.Join(t.folder, file)
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	// Renamed into place, so that the agent never reads a part of the file.
	if err := os.WriteFile(path+".new", regexp.MustCompile(pattern).ReplaceAll(old, []byte(text)), 0o644); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	line, err := t.waitSynced(ctx)
	if err == nil {
		t.printf("  %s: %s", what, line)
	}
	return err
}

const connections = 60

// answers makes connections to Services, and checks which pods answer and which source they see.
func (t *tour) answers(ctx context.Context) error {
	web, none := []string{"pod-1", "pod-2", "pod-3"}, lab.Dual{}
	itself := "pod-1, sent to itself, sees the node's address"
	if t.sockets != nil {
		itself = "pod-1, sent to itself, sees its own address: at the socket nothing is masqueraded"
	}
	for _, v := range []struct {
		title, port string
		from        *netlab.Host
		source, to  lab.Dual
		what        string
		pods        []string // that answer; nil means always the same one
		sees        string
		seen        func(f int, y *lab.Tally) bool
	}{
		{"shop/web by its cluster IP, 60 connections from pod-1:", "80", t.Pod1, none, lab.Dual{"10.96.0.10", "fd00:10:96::10"},
			"every endpoint answers", web, itself + ", and others see pod-1's own: %s", func(f int, y *lab.Tally) bool {
				me := lab.PodAddr["pod-1"][f]
				return y.Saw("pod-2", me) && y.Saw("pod-3", me) && len(y.Sources["pod-1"]) == 1 && y.Saw("pod-1", me) == (t.sockets != nil)
			}},
		{"shop/web by the node's port 30080, 60 connections from the client:", "30080", t.Client, lab.ClientAddr, lab.NodeAddr,
			"every endpoint answers", web, "the source is masqueraded: pods see %s", func(f int, y *lab.Tally) bool {
				return !y.Sources["pod-1"][lab.ClientAddr[f]] && !y.Sources["pod-2"][lab.ClientAddr[f]] && y.Saw("pod-3", lab.NodeAddr[f])
			}},
		{"shop/web by its load balancer's address, for some sources only:", "80", t.Client, lab.ClientAddr, lab.Dual{"203.0.113.80", "2001:db8:1b::80"},
			"every endpoint answers", web, "", nil},
		{"shop/local by its load balancer's address, with externalTrafficPolicy Local:", "80", t.Client, lab.ClientAddr, lab.Dual{"203.0.113.81", "2001:db8:1b::81"},
			"only the endpoint on this node answers the client", web[:1], "the source is preserved: pod-1 sees %s", func(f int, y *lab.Tally) bool {
				return y.Saw("pod-1", lab.ClientAddr[f])
			}},
		{"The same, from pod-2:", "80", t.Pod2, none, lab.Dual{"203.0.113.81", "2001:db8:1b::81"},
			"pods of the node may use every endpoint", []string{"pod-1", "pod-3"}, "", nil},
		{"shop/cart, with session affinity:", "80", t.Pod2, none, lab.Dual{"10.96.0.30", "fd00:10:96::30"},
			"pod-2 always gets the same endpoint", nil, "", nil},
	} {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		t.printf("\n%s", v.title)
		for f, family := range lab.Families {
			y := lab.Visits(v.from, v.source[f], lab.Port(v.to[f], v.port), connections)
			t.expect(y.Answered(v.pods...) || v.pods == nil && len(y.Errs) == 0 && len(y.Answers) == 1, "%s: %s: %v", family, v.what, y)
			if v.seen != nil {
				t.expect(v.seen(f, y), "%s: "+v.sees, family, y.SourceList())
			}
		}
		if v.from == t.Pod1 && t.sockets != nil {
			traffic, err := t.sockets.backend.Traffic(ctx)
			if err != nil {
				return err
			}
			n := uint64(0)
			for _, c := range traffic.Services {
				n += c.Connections
			}
			t.expect(n == 2*connections, "%d connections of pods were translated at the socket", n)
		}
	}
	return nil
}

// silence makes connections that no pod answers.
func (t *tour) silence(context.Context) error {
	t.printf("\nDestinations without an answer:")
	web, empty, none := lab.Dual{"203.0.113.80", "2001:db8:1b::80"}, lab.Dual{"10.96.0.40", "fd00:10:96::40"}, lab.Dual{"10.96.0.250", "fd00:10:96::250"}
	for f, family := range lab.Families {
		for _, v := range []struct {
			from       *netlab.Host
			source, to string
			refused    bool
			what       string
		}{
			{t.Pod1, "", lab.Port(empty[f], "80"), true, "shop/empty, without endpoints, refuses immediately"},
			{t.Pod1, "", lab.Port(empty[f], "81"), true, "a closed port of a cluster IP refuses, too"},
			{t.Pod1, "", lab.Port(none[f], "80"), false, "a cluster IP that no Service has does not answer"},
			{t.Client, lab.StrangerAddr[f], lab.Port(web[f], "80"), false, "shop/web's load balancer does not answer " + lab.StrangerAddr[f] + ", outside the ranges"},
		} {
			wait := lab.NoAnswerTimeout
			if v.refused {
				wait = testtime.Timeout
			}
			c, err := lab.Dial(v.from, "tcp", v.source, v.to, wait)
			if err == nil {
				c.Close()
			}
			t.expect(v.refused && errors.Is(err, syscall.ECONNREFUSED) || !v.refused && lab.IsTimeout(err), "%s: %s", family, v.what)
		}
	}
	return nil
}

// udp sends questions to the name server from one socket, removes the endpoint that answers,
// and sends another question. The socket is not connected: no program sees the datagrams of one that is.
func (t *tour) udp(ctx context.Context) error {
	t.printf("\nkube-system/dns, over UDP, from one unconnected socket of pod-2 in each family:")
	var talks [2]*lab.Talk
	var before [2]string
	for f, vip := range (lab.Dual{"10.96.0.53", "fd00:10:96::53"}) {
		c, err := unconnected(t.Pod2, lab.Port(vip, "53"))
		if err != nil {
			return err
		}
		defer c.Close()
		talks[f] = c
		before[f], _, err = c.Ask()
		t.expect(err == nil, "%s: %s answers", lab.Families[f], before[f])
	}
	pattern := fmt.Sprintf("(?m)^.*10[.]1[.].* # %s\n|^.*fd00:.* # %s\n", before[0], before[1])
	if err := t.edit(ctx, "these endpoints are removed", "endpoints-dns.yaml", pattern, ""); err != nil {
		return err
	}
	for f, c := range talks {
		// The agent deletes the flows after the sync, which does not wait for it. An answer under way is lost then.
		name, _, err := c.AskOverUDP()
		for end := time.Now().Add(flowsMove); (err != nil || name == before[f]) && time.Now().Before(end); time.Sleep(time.Millisecond) {
			name, _, err = c.AskOverUDP()
		}
		t.expect(err == nil && name != before[f], "%s: the same socket now asks %s", lab.Families[f], name)
	}
	return nil
}

// flowsMove is how long a UDP flow may take to leave an endpoint that is gone.
const flowsMove = 2 * time.Second

// changes adds an endpoint and removes another while two hosts open connections all the
// time and one connection stays open.
func (t *tour) changes(ctx context.Context) error {
	t.printf("\nshop/web changes while the client and pod-1 open connections all the time:")
	long, err := t.connectionTo("pod-2")
	if err != nil {
		return err
	}
	defer long.Close()

	s := lab.NewStream(t.Client, lab.Port("203.0.113.80", "80"), t.Pod1, lab.Port("fd00:10:96::10", "80"))
	defer s.Stop()
	if err := t.edit(ctx, "pod-4 becomes ready", "endpoints-web.yaml", ", conditions: {ready: false}", ""); err != nil {
		return err
	}
	y := s.Next(2 * connections)
	t.expect(y.Answers["pod-4"] > 0, "pod-4 gets its share: %v", y)
	if err := t.edit(ctx, "pod-2 is removed", "endpoints-web.yaml", "(?m)^.* # pod-2\n", ""); err != nil {
		return err
	}
	y = s.Next(2 * connections)
	t.expect(y.Answered("pod-1", "pod-3", "pod-4"), "pod-2 gets no more connections: %v", y)
	name, _, err := long.Ask()
	t.expect(err == nil && name == "pod-2", "the connection to pod-2 that was open before the change still works")
	y = s.Stop()
	total := len(y.Errs)
	for _, n := range y.Answers {
		total += n
	}
	t.expect(len(y.Errs) == 0, "of %d connections, %d failed: %v", total, len(y.Errs), y)
	return nil
}

// connectionTo opens connections from the client to shop/web's NodePort until one
// gets to the pod.
func (t *tour) connectionTo(pod string) (*lab.Talk, error) {
	for range 1000 {
		c, err := lab.Dial(t.Client, "tcp", "", lab.Port(lab.NodeAddr[0], "30080"), testtime.Timeout)
		if err != nil {
			return nil, err
		}
		name, _, err := c.Hear()
		if err == nil && name == pod {
			return c, nil
		}
		c.Close()
	}
	return nil, fmt.Errorf("no connection to shop/web got to %s", pod)
}

// list returns the command that lists the rules.
func (t *tour) list() []string {
	if t.mode == config.ModeIPTables {
		return []string{"iptables-save"}
	}
	return []string{"nft", "list", "table", "ip", "proxier"}
}

// howToLook returns functions for the shell of another terminal, bash or zsh: on_node and in_pod
// run programs on the node and in a pod, and world prints nodeproxy's flags for the node's objects.
func (t *tour) howToLook() string {
	enter := func(h *netlab.Host) string {
		return fmt.Sprintf("nsenter --preserve-credentials --user --target %d --net=%s", os.Getpid(), h.Path())
	}
	return fmt.Sprintf("  on_node() { %s \"$@\"; }\n  in_pod() { %s \"$@\"; }\n  world() { echo %s; }\n  on_node %s", enter(t.Node), enter(t.Pod1),
		strings.Join(t.objectFlags(), " "), strings.Join(t.list(), " "))
}

// objectFlags returns nodeproxy's flags for the node's objects.
func (t *tour) objectFlags() []string {
	return []string{"--manifests", t.folder, "--hostname-override", "node-1", "--cluster-cidr", "10.1.0.0/16,fd00:10:1::/48", "--proxy-mode", t.mode}
}

// showRules prints how to list the rules and, if the program is installed, the rules of a
// Service.
func (t *tour) showRules() {
	list := t.list()
	t.printf("\nTo list the rules, run %q on a node, or here\nwhile \"nodeproxy demo --hold\" waits. The rules of shop/web:", strings.Join(list, " "))
	if _, err := exec.LookPath(list[0]); err != nil {
		t.printf("  (%s is not installed here; the proxy does not need it)", list[0])
		return
	}
	listing, err := t.Node.Output(list[0], list[1:]...)
	if err != nil {
		t.printf("  (%v)", err)
		return
	}
	for line := range strings.Lines(listing) {
		if strings.Contains(line, `"shop/web:`) {
			t.printf("  %s", strings.TrimPrefix(strings.TrimSpace(line), "elements = { "))
		}
	}
}
