package takeover

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"
)

// InstanceHeader is the header by which answers of nodeproxy differ from kube-proxy's. Its
// value is chosen at random by each process.
const InstanceHeader = "Nodeproxy-Instance"

// probeTimeout bounds one request.
const probeTimeout = 500 * time.Millisecond

// maxAnswer is the longest answer that is read, in bytes.
const maxAnswer = 4096

// Prober asks the servers of other proxies in the network namespace for their mode, and looks for
// the process of a kube-proxy that does not answer. It is not safe for concurrent use.
type Prober struct {
	// Own is the value of this process's InstanceHeader.
	Own string
	// Metrics and Healthz hold the addresses to ask, host:port.
	Metrics, Healthz []string
	// Skip, if not nil, reports that an address is this process's own and must not be asked.
	Skip func(addr string) bool
	// Trusted, if not nil, reports whether an answer at an address counts: see [ListenerIsRoots].
	Trusted func(addr string) bool
	// Dial, if not nil, connects to an address.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Runs, if not nil, reports whether a process named kube-proxy runs. It is called if no proxy
	// answers: a nodeproxy that answers may have this name, too.
	Runs func() bool

	last map[string][]Kind
}

// The ports where proxies serve their metrics and their health check by default.
const (
	metricsPort = "10249"
	healthzPort = "10256"
)

// Addresses returns the addresses where proxies may serve their metrics and their health check: the
// loopback addresses at the default ports, and at those of the agent's own configured addresses,
// which are host:port or empty, and these addresses themselves. A kube-proxy that the agent
// replaces often has the same configuration.
func Addresses(ownMetrics, ownHealthz string) (metrics, healthz []string) {
	return addresses(metricsPort, ownMetrics), addresses(healthzPort, ownHealthz)
}

func addresses(port, own string) []string {
	out := loopback(port)
	host, ownPort, err := net.SplitHostPort(own)
	if err != nil {
		return out
	}
	list := loopback(ownPort)
	if ip, err := netip.ParseAddr(host); err != nil || !ip.IsUnspecified() {
		list = append(list, own)
	}
	for _, a := range list {
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

func loopback(port string) []string { return []string{"127.0.0.1:" + port, "[::1]:" + port} }

// Look returns the kinds of rules whose owners run now. A proxy that does not report its mode
// counts for all modes. An address that does not answer in time keeps its last answer.
func (p *Prober) Look(ctx context.Context) []Kind {
	now := map[string][]Kind{}
	c := &http.Client{
		Timeout:       probeTimeout,
		Transport:     &http.Transport{DialContext: p.Dial, DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var out []Kind
	for _, a := range p.Metrics {
		now[a] = p.ask(ctx, c, a, "/proxyMode", modeOf)
		out = append(out, now[a]...)
	}
	known := map[Owner]bool{}
	for _, k := range out {
		known[k.Owner] = true
	}
	for _, a := range p.Healthz {
		now[a] = p.ask(ctx, c, a, "/healthz", anyMode)
		for _, k := range now[a] {
			if !known[k.Owner] {
				out = append(out, k)
			}
		}
	}
	p.last = now
	if len(out) == 0 && p.Runs != nil && p.Runs() {
		for _, m := range modes {
			out = append(out, Kind{KubeProxy, m})
		}
	}
	slices.SortFunc(out, func(a, b Kind) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(out)
}

// ask returns the kinds that an answer tells. An answer of another program, or of this process,
// tells none.
func (p *Prober) ask(ctx context.Context, c *http.Client, addr, path string, read func(body string) []string) []Kind {
	if p.Skip != nil && p.Skip(addr) {
		return nil
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return nil
	}
	answer, err := c.Do(r)
	if err != nil {
		var timeout net.Error
		if !errors.Is(err, syscall.ECONNREFUSED) && errors.As(err, &timeout) && timeout.Timeout() {
			return p.last[addr]
		}
		return nil
	}
	defer answer.Body.Close()
	instance := answer.Header.Get(InstanceHeader)
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil || instance == p.Own && instance != "" {
		return nil
	}
	owner := KubeProxy
	if instance != "" {
		owner = Nodeproxy
	}
	var out []Kind
	for _, m := range read(string(body)) {
		out = append(out, Kind{owner, m})
	}
	if len(out) != 0 && p.Trusted != nil && !p.Trusted(addr) {
		return nil
	}
	return out
}

// modeOf reads an answer of /proxyMode.
func modeOf(body string) []string {
	if m := strings.TrimSpace(body); slices.Contains(modes, m) {
		return []string{m}
	}
	return nil
}

// anyMode reads an answer of a proxy's /healthz, of whatever status.
func anyMode(body string) []string {
	if strings.Contains(body, `"lastUpdated"`) && strings.Contains(body, `"currentTime"`) {
		return modes
	}
	return nil
}
