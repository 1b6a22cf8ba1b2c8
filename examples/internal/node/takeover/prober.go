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
	"time"
)

// InstanceHeader is the header by which answers of nodeproxy differ from kube-proxy's. Its
// value is chosen at random by each process.
const InstanceHeader = "Nodeproxy-Instance"

// probeTimeout bounds one request, and maxAnswer the bytes of an answer that are read.
const (
	probeTimeout = 2 * time.Second
	maxAnswer    = 4096
)

// Prober asks the servers of other proxies in the network namespace for their mode, and looks for
// the process of a kube-proxy that does not answer. It is not safe for concurrent use.
type Prober struct {
	// Own is the value of this process's InstanceHeader.
	Own string
	// Pages are the pages to ask: see [Pages].
	Pages []string
	// Trusted, if not nil, reports whether an answer at an address counts: see [ListenerIsRoots].
	Trusted func(addr string) bool
	// Dial, if not nil, connects to an address.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Runs, if not nil, reports whether a process named kube-proxy runs. It is called if no proxy
	// answers: a nodeproxy that answers may have this name, too.
	Runs func() bool

	last map[string]Kind
}

// Pages returns the pages by which proxies are recognized, without "http://": those of their metrics and
// health-check servers at loopback addresses, at the default ports and at those of the agent's own
// addresses, which are host:port or empty, and at these addresses. A kube-proxy that the agent
// replaces often has the same configuration.
func Pages(ownMetrics, ownHealthz string) []string {
	out := slices.Concat(pages("10249", ownMetrics, "/proxyMode"), pages("10256", ownHealthz, "/healthz"))
	slices.Sort(out)
	return slices.Compact(out)
}

func pages(port, own, path string) []string {
	out := []string{"127.0.0.1:" + port + path, "[::1]:" + port + path}
	if host, port, err := net.SplitHostPort(own); err == nil {
		out = append(out, "127.0.0.1:"+port+path, "[::1]:"+port+path)
		if ip, err := netip.ParseAddr(host); err != nil || !ip.IsUnspecified() {
			out = append(out, own+path)
		}
	}
	return out
}

// Look returns the proxies that run now. The Mode of one that does not report it is "". A page that does
// not answer in time keeps its last answer.
func (p *Prober) Look(ctx context.Context) (out []Kind) {
	c := &http.Client{
		Timeout:       probeTimeout,
		Transport:     &http.Transport{DialContext: p.Dial, DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	now := map[string]Kind{}
	for _, page := range p.Pages {
		if k := p.ask(ctx, c, page); k.Owner != "" {
			now[page] = k
			out = append(out, k)
		}
	}
	p.last = now
	if len(out) == 0 && p.Runs != nil && p.Runs() {
		return []Kind{{KubeProxy, ""}}
	}
	slices.SortFunc(out, func(a, b Kind) int { return strings.Compare(b.String(), a.String()) })
	return slices.CompactFunc(out, func(a, b Kind) bool { return a.Owner == b.Owner && (a.Mode == b.Mode || a.Mode == "") })
}

// ask returns the kind of a page's answer. An answer of another program, or of this process, has none.
func (p *Prober) ask(ctx context.Context, c *http.Client, page string) (none Kind) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+page, nil)
	if err != nil {
		return none
	}
	answer, err := c.Do(r)
	if err != nil {
		if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
			return p.last[page]
		}
		return none
	}
	defer answer.Body.Close()
	k := Kind{Owner: KubeProxy}
	switch instance := answer.Header.Get(InstanceHeader); {
	case instance != "" && instance == p.Own:
		return none
	case instance != "":
		k.Owner = Nodeproxy
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	text := strings.TrimSpace(string(body))
	switch {
	case err != nil:
		return none
	case slices.Contains([]string{"nftables", "iptables", "ipvs", "kernelspace"}, text):
		k.Mode = text
	case !strings.Contains(text, `"lastUpdated"`) || !strings.Contains(text, `"currentTime"`): // a /healthz, of whatever status
		return none
	}
	if addr, _, _ := strings.Cut(page, "/"); p.Trusted != nil && !p.Trusted(addr) {
		return none
	}
	return k
}
