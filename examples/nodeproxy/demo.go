package main

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/testtime"
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
	exitNoSpaces = 3
	// exitStopped is the status by which shells report SIGINT.
	exitStopped = 130
)

// demo runs the verb demo.
func demo(ctx context.Context, args []string, out, diag io.Writer) int {
	flags := pflag.NewFlagSet("demo", pflag.ContinueOnError)
	help(flags, `Usage: nodeproxy demo [flags]

Builds a small cluster of network namespaces, serves the manifests that ship with
the program, and sends real connections. It needs no privileges except the right to
create user namespaces, and changes nothing outside of them. The exit status is 0 if
all expectations held, 1 if one failed, 3 if namespaces cannot be created, and 130 if
the demo was interrupted.

`, diag)
	mode := flags.String("proxy-mode", config.ModeNFTables, "the data plane of node-1: nftables, or iptables, whose programs must be installed")
	sockets := flags.Bool("socket-lb", false, "translate the TCP connections of node-1 at the socket, as run --socket-lb does; needs root")
	hold := flags.Bool("hold", false, "keep the cluster at the end, to look around, until interrupted")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return 0
		}
		fmt.Fprintf(diag, "nodeproxy demo: %v\n", err)
		return 2
	}
	if flags.NArg() != 0 {
		fmt.Fprintf(diag, "nodeproxy demo: unexpected argument %q\n", flags.Arg(0))
		return 2
	}
	if *mode != config.ModeNFTables && *mode != config.ModeIPTables {
		fmt.Fprintf(diag, "nodeproxy demo: no demo of proxy mode %q\n", *mode)
		return 2
	}
	if *sockets {
		return demoSockets(ctx, *mode, *hold, out, diag)
	}
	inside, code, err := netlab.Reexec()
	if err == nil && !inside {
		return code
	}
	var t *tour
	if err == nil {
		t, err = newTour(*mode, out, diag)
	}
	if err != nil {
		fmt.Fprintf(diag, `nodeproxy demo: %v
The demo needs the right to create user and network namespaces. It may be restricted by
the parameters user.max_user_namespaces, kernel.unprivileged_userns_clone and
kernel.apparmor_restrict_unprivileged_userns, or by a container's seccomp profile. As
root, the demo needs no user namespaces.
`, err)
		return exitNoSpaces
	}
	return t.show(ctx, *hold)
}

// show runs the tour, prints the result and returns the exit status.
func (t *tour) show(ctx context.Context, hold bool) int {
	defer t.close()
	if err := t.run(ctx); errors.Is(err, errStopped) || ctx.Err() != nil {
		t.printf("\nStopped.")
		return exitStopped
	} else if err != nil {
		fmt.Fprintf(t.diag, "nodeproxy demo: %v\n", err)
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
	*demoLab
	mode            string
	out, diag       io.Writer
	folder          string // the folder of the manifests
	synced          chan string
	sockets         *demoCgroup // nil without --socket-lb
	checked, failed int
}

func newTour(mode string, out, diag io.Writer) (*tour, error) {
	lab, err := newDemoLab()
	if err != nil {
		return nil, err
	}
	return &tour{demoLab: lab, mode: mode, out: out, diag: diag, synced: make(chan string, 100)}, nil
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
func (t *tour) run(ctx context.Context) (err error) {
	if t.folder, err = os.MkdirTemp("", "nodeproxy-demo-"); err != nil {
		return err
	}
	files, err := worldFiles.ReadDir("world")
	if err != nil {
		return err
	}
	for _, f := range files {
		text, err := worldFiles.ReadFile("world/" + f.Name())
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(t.folder, f.Name()), text, 0o644); err != nil {
			return err
		}
	}
	t.printf(`node-1 has pod-1 and pod-2, node-2 has pod-3 and pod-4, and a client is outside of
the cluster: each in a network namespace of this process. The tour sends real
connections through the %s rules of node-1, for IPv4 and IPv6.`, t.mode)

	stop, err := t.startAgent(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	line, err := t.waitSynced(ctx)
	if err != nil {
		return err
	}
	if err := t.sockets.wait(ctx); err != nil {
		return err
	}
	t.printf("\nThe manifests are in effect: %s", line)

	for _, stop := range []func(){t.clusterIP, t.nodePort, t.loadBalancer, t.localPolicy, t.affinity, t.noEndpoints} {
		if ctx.Err() != nil {
			return errStopped
		}
		stop()
	}
	if err := t.udp(ctx); err != nil {
		return err
	}
	if err := t.changes(ctx); err != nil {
		return err
	}
	t.showRules()
	return nil
}

// startAgent runs the agent of the verb run in the node's namespace. stop ends the agent.
func (t *tour) startAgent(ctx context.Context) (stop func() error, err error) {
	// No servers: they would listen in this namespace, not the node's. No parameters: the
	// demo must not change the machine's.
	cfg, err := parse(newFlags("run", "", t.diag), append(t.objectFlags(),
		"--sync-period", "1s", "--min-sync-period", "0s",
		"--healthz-bind-address", "", "--metrics-bind-address", "",
		"--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0",
	), 0)
	if err != nil {
		return nil, err
	}
	t.sockets.configure(cfg)
	var a *agent
	err = t.node.Do(func() (err error) {
		a, err = newAgent(ctx, cfg, t.modes(), lines(t.synced), quiet(cfg, ownLogger(cfg, t.diag)))
		return err
	})
	if err != nil {
		return nil, err
	}
	t.sockets.follow(a)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- a.run(ctx) }()
	return func() error { cancel(); return <-ended }, nil
}

// modes returns the modes that the demo supports.
func (t *tour) modes() []mode {
	// The programs of iptables run from any thread, and without privileges they cannot open
	// the default lock file.
	m := iptablesModeWith(func(c *iptables.Config) {
		c.NetNS, c.LockFile = t.node.File(), filepath.Join(t.folder, "xtables.lock")
	})
	return []mode{nftablesMode(), m}
}

// lines is an io.Writer that sends each line to a channel.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- strings.TrimSpace(string(b))
	return len(b), nil
}

// errStopped ends a tour that was interrupted.
var errStopped = errors.New("interrupted")

// waitSynced returns the agent's line about the next change that is in effect.
func (t *tour) waitSynced(ctx context.Context) (string, error) {
	select {
	case line := <-t.synced:
		return line, nil
	case <-ctx.Done():
		return "", errStopped
	case <-time.After(time.Minute):
		return "", errors.New("no change came into effect for a minute")
	}
}

// edit changes a manifest, waits until the change is in effect, and prints it.
func (t *tour) edit(ctx context.Context, what, file string, change func(line string) string) error {
	path := filepath.Join(t.folder, file)
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var changed strings.Builder
	for line := range strings.Lines(string(text)) {
		changed.WriteString(change(line))
	}
	// Renamed into place, so that the agent never reads a part of the file.
	if err := os.WriteFile(path+".new", []byte(changed.String()), 0o644); err != nil {
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

// without removes a pod's endpoints.
func without(pod string) func(string) string {
	return func(line string) string {
		if strings.HasSuffix(line, "# "+pod+"\n") {
			return ""
		}
		return line
	}
}

// tally counts the answers of each server, and collects the sources that it saw.
type tally struct {
	answers map[string]int             // by server
	sources map[string]map[string]bool // by server
	errs    []error
}

func newTally() *tally {
	return &tally{answers: map[string]int{}, sources: map[string]map[string]bool{}}
}

func (y *tally) add(name, source string, err error) {
	if err != nil {
		y.errs = append(y.errs, err)
		return
	}
	y.answers[name]++
	if y.sources[name] == nil {
		y.sources[name] = map[string]bool{}
	}
	y.sources[name][source] = true
}

// visits makes n connections, or fewer if connections fail.
func visits(h *netlab.Host, from, to string, n int) *tally {
	y := newTally()
	for i := 0; i < n && len(y.errs) == 0; i++ {
		y.add(visit(h, from, to))
	}
	return y
}

// answered reports whether there was no error and exactly these servers answered.
func (y *tally) answered(names ...string) bool {
	return len(y.errs) == 0 && slices.Equal(slices.Sorted(maps.Keys(y.answers)), names)
}

// saw reports whether a server saw only that source.
func (y *tally) saw(name, source string) bool {
	return len(y.sources[name]) == 1 && y.sources[name][source]
}

// String returns the distribution, and the first error, if any.
func (y *tally) String() string {
	var b strings.Builder
	for i, name := range slices.Sorted(maps.Keys(y.answers)) {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %d", name, y.answers[name])
	}
	if n := len(y.errs); n > 0 {
		fmt.Fprintf(&b, "; %d failed, first: %v", n, y.errs[0])
	}
	return b.String()
}

// sourceList returns all sources that the servers saw.
func (y *tally) sourceList() string {
	all := map[string]bool{}
	for _, s := range y.sources {
		maps.Copy(all, s)
	}
	return strings.Join(slices.Sorted(maps.Keys(all)), " and ")
}

const connections = 60

func (t *tour) clusterIP() {
	t.printf("\nshop/web by its cluster IP, %d connections from pod-1:", connections)
	for f, vip := range (dual{"10.96.0.10", "fd00:10:96::10"}) {
		y := visits(t.pod1, "", port(vip, "80"), connections)
		t.expect(y.answered("pod-1", "pod-2", "pod-3"), "%s: every endpoint answers: %v", families[f], y)
		me := podAddr["pod-1"][f]
		t.expect(y.saw("pod-2", me) && y.saw("pod-3", me), "%s: other pods see pod-1's own address, %s", families[f], me)
		if t.sockets != nil {
			t.expect(y.saw("pod-1", me), "%s: pod-1, sent to itself, sees its own address: at the socket nothing is masqueraded", families[f])
			continue
		}
		t.expect(len(y.sources["pod-1"]) == 1 && !y.sources["pod-1"][me],
			"%s: pod-1, sent to itself, sees the node's address", families[f])
	}
	t.sockets.count(t, 2*connections)
}

func (t *tour) nodePort() {
	t.printf("\nshop/web by the node's port 30080, %d connections from the client:", connections)
	for f, addr := range nodeAddr {
		y := visits(t.client, clientAddr[f], port(addr, "30080"), connections)
		t.expect(y.answered("pod-1", "pod-2", "pod-3"), "%s: every endpoint answers: %v", families[f], y)
		t.expect(!y.sources["pod-1"][clientAddr[f]] && !y.sources["pod-2"][clientAddr[f]] && y.saw("pod-3", nodeAddr[f]),
			"%s: the source is masqueraded: pods see %s", families[f], y.sourceList())
	}
}

func (t *tour) loadBalancer() {
	t.printf("\nshop/web by its load balancer's address, for some sources only:")
	for f, vip := range (dual{"203.0.113.80", "2001:db8:1b::80"}) {
		y := visits(t.client, clientAddr[f], port(vip, "80"), connections)
		t.expect(y.answered("pod-1", "pod-2", "pod-3"), "%s: from %s every endpoint answers: %v", families[f], clientAddr[f], y)
		c, err := dial(t.client, "tcp", strangerAddr[f], port(vip, "80"), noAnswerTimeout)
		if err == nil {
			c.Close()
		}
		t.expect(isTimeout(err), "%s: from %s, outside the ranges, a connection gets no answer", families[f], strangerAddr[f])
	}
}

func (t *tour) localPolicy() {
	t.printf("\nshop/local by its load balancer's address, with externalTrafficPolicy Local:")
	for f, vip := range (dual{"203.0.113.81", "2001:db8:1b::81"}) {
		y := visits(t.client, clientAddr[f], port(vip, "80"), connections)
		t.expect(y.answered("pod-1"), "%s: only the endpoint on this node answers the client: %v", families[f], y)
		t.expect(y.saw("pod-1", clientAddr[f]), "%s: the source is preserved: pod-1 sees %s", families[f], y.sourceList())
		y = visits(t.pod2, "", port(vip, "80"), connections)
		t.expect(y.answered("pod-1", "pod-3"), "%s: pods of the node may use every endpoint: %v", families[f], y)
	}
}

func (t *tour) affinity() {
	t.printf("\nshop/cart, with session affinity:")
	for f, vip := range (dual{"10.96.0.30", "fd00:10:96::30"}) {
		y := visits(t.pod2, "", port(vip, "80"), connections)
		t.expect(len(y.errs) == 0 && len(y.answers) == 1, "%s: pod-2 always gets the same endpoint: %v", families[f], y)
	}
}

func (t *tour) noEndpoints() {
	t.printf("\nDestinations without an answer:")
	for f, vip := range (dual{"10.96.0.40", "fd00:10:96::40"}) {
		_, err := dial(t.pod1, "tcp", "", port(vip, "80"), testtime.Timeout)
		t.expect(errors.Is(err, syscall.ECONNREFUSED), "%s: shop/empty, without endpoints, refuses at once", families[f])
		_, err = dial(t.pod1, "tcp", "", port(vip, "81"), testtime.Timeout)
		t.expect(errors.Is(err, syscall.ECONNREFUSED), "%s: a closed port of a cluster IP refuses, too", families[f])
	}
	for f, vip := range (dual{"10.96.0.250", "fd00:10:96::250"}) {
		_, err := dial(t.pod1, "tcp", "", port(vip, "80"), noAnswerTimeout)
		t.expect(isTimeout(err), "%s: a cluster IP that no Service has does not answer", families[f])
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// udp sends questions to the name server from one socket, removes the endpoint that answers,
// and sends another question.
func (t *tour) udp(ctx context.Context) error {
	t.printf("\nkube-system/dns, over UDP, from one socket of pod-2 in each family:")
	var talks [2]*talk
	var before [2]string
	for f, vip := range (dual{"10.96.0.53", "fd00:10:96::53"}) {
		c, err := dial(t.pod2, "udp", "", port(vip, "53"), testtime.Timeout)
		if err != nil {
			return err
		}
		defer c.Close()
		talks[f] = c
		before[f], _, err = c.ask()
		t.expect(err == nil, "%s: %s answers", families[f], before[f])
	}
	err := t.edit(ctx, "these endpoints are removed", "endpoints-dns.yaml", func(line string) string {
		f := 0
		if strings.Contains(line, "fd00:") {
			f = 1
		}
		return without(before[f])(line)
	})
	if err != nil {
		return err
	}
	for f, c := range talks {
		name, _, err := c.ask()
		t.expect(err == nil && name != before[f], "%s: the next question of the same socket goes to %s", families[f], name)
	}
	return nil
}

// changes adds an endpoint and removes another while two hosts open connections all the
// time and one connection stays open.
func (t *tour) changes(ctx context.Context) error {
	t.printf("\nshop/web changes while the client and pod-1 open connections all the time:")
	long, err := t.connectionTo("pod-2")
	if err != nil {
		return err
	}
	defer long.Close()

	s := newStream(t.client, port("203.0.113.80", "80"), t.pod1, port("fd00:10:96::10", "80"))
	defer s.stop()
	err = t.edit(ctx, "pod-4 becomes ready", "endpoints-web.yaml", func(line string) string {
		return strings.Replace(line, ", conditions: {ready: false}", "", 1)
	})
	if err != nil {
		return err
	}
	y := s.next(2 * connections)
	t.expect(y.answers["pod-4"] > 0, "pod-4 gets its share: %v", y)
	if err := t.edit(ctx, "pod-2 is removed", "endpoints-web.yaml", without("pod-2")); err != nil {
		return err
	}
	y = s.next(2 * connections)
	t.expect(y.answered("pod-1", "pod-3", "pod-4"), "pod-2 gets no more connections: %v", y)
	name, _, err := long.ask()
	t.expect(err == nil && name == "pod-2", "the connection to pod-2 that was open before the change still works")
	y = s.stop()
	total := 0
	for _, n := range y.answers {
		total += n
	}
	t.expect(len(y.errs) == 0, "of %d connections, %d failed%s", total+len(y.errs), len(y.errs), firstError(y.errs))
	return nil
}

func firstError(errs []error) string {
	if len(errs) == 0 {
		return ""
	}
	return fmt.Sprintf(", first: %v", errs[0])
}

// connectionTo opens connections from the client to shop/web's NodePort until one
// gets to the pod.
func (t *tour) connectionTo(pod string) (*talk, error) {
	for range 1000 {
		c, err := dial(t.client, "tcp", "", port(nodeAddr[0], "30080"), testtime.Timeout)
		if err != nil {
			return nil, err
		}
		name, _, err := c.hear()
		if err == nil && name == pod {
			return c, nil
		}
		c.Close()
	}
	return nil, fmt.Errorf("no connection to shop/web got to %s", pod)
}

// stream opens connections from two hosts until it is stopped.
type stream struct {
	mu    sync.Mutex
	moved *sync.Cond
	// all counts every connection, and since the connections that began after the last
	// call of next.
	all, since *tally
	round, n   int
	quit       bool
	visit      func(h *netlab.Host, from, to string) (name, source string, err error)
	wg         sync.WaitGroup
}

func newStream(a *netlab.Host, toA string, b *netlab.Host, toB string) *stream {
	return startStream(&stream{visit: visit}, a, toA, b, toB)
}

func startStream(s *stream, a *netlab.Host, toA string, b *netlab.Host, toB string) *stream {
	s.all, s.since = newTally(), newTally()
	s.moved = sync.NewCond(&s.mu)
	s.wg.Go(func() { s.loop(a, toA) })
	s.wg.Go(func() { s.loop(b, toB) })
	return s
}

func (s *stream) loop(h *netlab.Host, to string) {
	for {
		s.mu.Lock()
		round, quit := s.round, s.quit
		s.mu.Unlock()
		if quit {
			return
		}
		name, source, err := s.visit(h, "", to)
		s.mu.Lock()
		s.all.add(name, source, err)
		if round == s.round {
			s.since.add(name, source, err)
			s.n++
		}
		s.moved.Broadcast()
		s.mu.Unlock()
	}
}

// next returns the results of n connections that begin after the call.
func (s *stream) next(n int) *tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.round++
	s.since, s.n = newTally(), 0
	for s.n < n {
		s.moved.Wait()
	}
	s.round++ // ends the tally that is returned
	return s.since
}

// stop ends the stream and returns the results of all connections.
func (s *stream) stop() *tally {
	s.mu.Lock()
	s.quit = true
	s.mu.Unlock()
	s.wg.Wait()
	return s.all
}

// list returns the command that lists the rules.
func (t *tour) list() []string {
	if t.mode == config.ModeIPTables {
		return []string{"iptables-save"}
	}
	return []string{"nft", "list", "table", "ip", "proxier"}
}

// howToLook returns commands that set variables for another terminal: to run programs on the
// node or in a pod, and with nodeproxy's flags for the node's objects.
func (t *tour) howToLook() string {
	enter := func(h *netlab.Host) string {
		return fmt.Sprintf("nsenter --preserve-credentials --user --target %d --net=%s", os.Getpid(), h.Path())
	}
	return fmt.Sprintf("  NODE='%s'\n  POD='%s'\n  WORLD='%s'\n  $NODE %s", enter(t.node), enter(t.pod1),
		strings.Join(t.objectFlags(), " "), strings.Join(t.list(), " "))
}

// objectFlags returns nodeproxy's flags for the node's objects.
func (t *tour) objectFlags() []string {
	return []string{"--manifests", t.folder, "--hostname-override", "node-1", "--cluster-cidr", "10.1.0.0/16,fd00:10:1::/48", "--proxy-mode", t.mode}
}

// close ends everything and removes the manifests.
func (t *tour) close() {
	t.demoLab.close()
	if t.folder != "" {
		os.RemoveAll(t.folder)
	}
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
	listing, err := t.node.Output(list[0], list[1:]...)
	if err != nil {
		t.printf("  (%v)", err)
		return
	}
	object := ""
	for line := range strings.Lines(listing) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "\tmap ") || strings.HasPrefix(line, "\tset "):
			object = strings.TrimSuffix(strings.TrimSpace(line), " {")
		case strings.HasPrefix(line, "*"):
			object = line[1:]
		}
		if strings.Contains(line, `"shop/web:`) {
			t.printf("  %s: %s", object, strings.TrimPrefix(strings.TrimSpace(line), "elements = { "))
		}
	}
}
