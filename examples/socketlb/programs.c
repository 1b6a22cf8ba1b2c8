//go:build ignore

// The programs that translate connections and datagrams of sockets. DESIGN.md shows the way of a
// connection. Script compile compiles this file, and hooks_linux.go loads and attaches the programs.
//
// A program that leaves a connection or a datagram alone lets it go to the backend behind. It does so
// whenever a lookup fails, such as the lookup of a slot that is being removed.

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

char LICENSE[] SEC("license") = "Apache-2.0";

enum {
	FLOWS_OF_SOCKET = 8, // the most flows of a socket: a program looks at all of them
	FLOW_MEMBER = 0,     // the target of a member that is not one of a pool
	CONNECTED = 1, // the state of a connected socket, of UDP, too (TCP_ESTABLISHED)
};

// Set before the programs are loaded.
volatile const __u64 host = 0;           // the cookie of the node's network namespace
volatile const __u32 recent_size = 1;     // the entries of recent, a power of two
volatile const __u32 namespaces_size = 1; // the entries of namespaces
volatile const __u32 namespace_flows = 1; // the most flows of a network namespace

// The keys and values of the maps. maps_linux.go describes them. None has a gap.

struct endpoint {
	__u32 addr[4]; // an IPv4 address is IPv4-mapped
	__u16 port;
	__u16 protocol; // IPPROTO_UDP of a Service's address, or else 0
};

struct pool {
	__u32 target, size;
};

struct frontend {
	__u64 service, affinity;
	struct pool node, pods;
};

struct slot_key {
	__u64 service;
	__u32 target, slot;
};

struct member_key {
	__u64 service;
	__u32 target;
	struct endpoint endpoint;
};

struct address {
	__u32 node_ports, source, family;
};

struct client_key {
	__u64 service, netns;
};

struct client {
	__u64 seen;
	struct endpoint endpoint;
	__u32 pad;
};

struct peer {
	struct endpoint service, endpoint;
} __attribute__((aligned(8)));

struct recent {
	__u64 cookie, overflow;
	struct peer peer;
	__u64 pad;
};

struct flow_key {
	__u64 cookie;
	__u32 number, pad;
};

struct connections {
	__u64 node, pods;
};

// MAP declares a map. maps_linux.go sets the number of entries.
#define MAP(name, kind, k, v, flags) \
	struct { \
		__uint(type, kind); \
		__type(key, k); \
		__type(value, v); \
		__uint(max_entries, 1); \
		__uint(map_flags, flags); \
	} name SEC(".maps")

MAP(frontends, BPF_MAP_TYPE_HASH, struct endpoint, struct frontend, BPF_F_NO_PREALLOC);
MAP(endpoints, BPF_MAP_TYPE_HASH, struct slot_key, struct endpoint, BPF_F_NO_PREALLOC);
MAP(members, BPF_MAP_TYPE_HASH, struct member_key, __u8, BPF_F_NO_PREALLOC);
MAP(addresses, BPF_MAP_TYPE_HASH, __u32[4], struct address, BPF_F_NO_PREALLOC);
MAP(clients, BPF_MAP_TYPE_LRU_HASH, struct client_key, struct client, 0);
MAP(recent, BPF_MAP_TYPE_ARRAY, __u32, struct recent, 0);
MAP(peers, BPF_MAP_TYPE_HASH, __u64, struct peer, 0);
MAP(flows, BPF_MAP_TYPE_HASH, struct flow_key, struct peer, 0);
MAP(namespaces, BPF_MAP_TYPE_ARRAY, __u32, __u64, 0);
MAP(connections, BPF_MAP_TYPE_PERCPU_HASH, __u64, struct connections, BPF_F_NO_PREALLOC);

#define inline static __always_inline

inline bool same(const struct endpoint *a, const struct endpoint *b)
{
	return a->addr[0] == b->addr[0] && a->addr[1] == b->addr[1] && a->addr[2] == b->addr[2] &&
	       a->addr[3] == b->addr[3] && a->port == b->port && a->protocol == b->protocol;
}

// read_peer reads the address and port that the process or the kernel names.
inline void read_peer(struct bpf_sock_addr *ctx, bool v6, struct endpoint *to)
{
	if (v6) {
		to->addr[0] = ctx->user_ip6[0];
		to->addr[1] = ctx->user_ip6[1];
		to->addr[2] = ctx->user_ip6[2];
		to->addr[3] = ctx->user_ip6[3];
	} else {
		to->addr[2] = bpf_htonl(0xffff);
		to->addr[3] = ctx->user_ip4;
	}
	to->port = ctx->user_port;
}

inline void write_peer(struct bpf_sock_addr *ctx, bool v6, const struct endpoint *to)
{
	if (v6) {
		ctx->user_ip6[0] = to->addr[0];
		ctx->user_ip6[1] = to->addr[1];
		ctx->user_ip6[2] = to->addr[2];
		ctx->user_ip6[3] = to->addr[3];
	} else {
		ctx->user_ip4 = to->addr[3];
	}
	ctx->user_port = to->port;
}

inline bool connected(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	return sk && sk->state == CONNECTED;
}

// find_frontend returns the frontend of a destination.
inline struct frontend *find_frontend(const struct endpoint *to)
{
	struct frontend *f = bpf_map_lookup_elem(&frontends, to);
	if (f)
		return f;
	struct address *a = bpf_map_lookup_elem(&addresses, to->addr);
	if (!a || !a->node_ports)
		return NULL;
	struct endpoint any = {.addr = {0, 0, a->family, 0}, .port = to->port, .protocol = to->protocol};
	return bpf_map_lookup_elem(&frontends, &any);
}

// choice holds the pool from which an endpoint is chosen for a client.
struct choice {
	struct frontend *frontend;
	struct pool pool;
	struct client_key client;
};

// choose_pool finds the pool of the node, for sockets in the node's own network namespace, or that of
// pods. It reports whether there is an endpoint that can answer the socket.
inline bool choose_pool(struct bpf_sock_addr *ctx, bool v6, const struct endpoint *to, struct choice *c)
{
	c->frontend = find_frontend(to);
	if (!c->frontend)
		return false;
	c->client.service = c->frontend->service;
	c->client.netns = bpf_get_netns_cookie(ctx);
	c->pool = c->frontend->pods;
	if (c->client.netns != host)
		return c->pool.size != 0;
	c->pool = c->frontend->node;
	struct bpf_sock *sk = ctx->sk;
	if (!sk)
		return false;
	__u32 source[4] = {};
	if (v6) {
		source[0] = sk->src_ip6[0];
		source[1] = sk->src_ip6[1];
		source[2] = sk->src_ip6[2];
		source[3] = sk->src_ip6[3];
	} else {
		source[3] = sk->src_ip4;
	}
	if (source[0] | source[1] | source[2] | source[3]) { // the socket is bound
		if (!v6)
			source[2] = bpf_htonl(0xffff);
		struct address *a = bpf_map_lookup_elem(&addresses, source);
		if (!a || !a->source)
			return false;
	}
	return c->pool.size != 0;
}

// member reports whether a pool, or FLOW_MEMBER, has an endpoint.
inline bool member(__u64 service, __u32 target, const struct endpoint *e)
{
	struct member_key k = {.service = service, .target = target, .endpoint = *e};
	return bpf_map_lookup_elem(&members, &k) != NULL;
}

// choose_endpoint finds an endpoint: that of the client's last connection, if the Service has affinity, or
// else any.
inline bool choose_endpoint(const struct choice *c, struct endpoint *out)
{
	__u64 service = c->client.service, affinity = c->frontend->affinity;
	if (affinity) {
		struct client *seen = bpf_map_lookup_elem(&clients, &c->client);
		__u64 now = bpf_ktime_get_ns();
		if (seen && (__s64)(now - seen->seen) < (__s64)affinity && member(service, c->pool.target, &seen->endpoint)) {
			seen->seen = now;
			*out = seen->endpoint;
			return true;
		}
	}
	struct slot_key k = {.service = service, .target = c->pool.target};
	k.slot = (__u64)bpf_get_prandom_u32() * c->pool.size >> 32;
	struct endpoint *e = bpf_map_lookup_elem(&endpoints, &k);
	if (!e)
		return false;
	*out = *e;
	if (affinity) {
		struct client visit = {.seen = bpf_ktime_get_ns(), .endpoint = *e};
		bpf_map_update_elem(&clients, &c->client, &visit, BPF_ANY);
	}
	return true;
}

inline void count(const struct choice *c)
{
	bool own = c->client.netns == host;
	struct connections *n = bpf_map_lookup_elem(&connections, &c->client.service);
	if (n) {
		n->node += own;
		n->pods += !own;
	} else {
		struct connections first = {.node = own, .pods = !own};
		bpf_map_update_elem(&connections, &c->client.service, &first, BPF_ANY);
	}
}

// recent_of returns the entry of recent that a socket shares with others. It is never NULL, but the
// verifier does not know.
inline struct recent *recent_of(__u64 cookie)
{
	__u32 k = cookie & (recent_size - 1);
	return bpf_map_lookup_elem(&recent, &k);
}

// store_peer stores a socket's peer for getpeername. It reports whether there is room.
inline bool store_peer(struct bpf_sock_addr *ctx, const struct peer *p)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct recent *r = recent_of(cookie);
	if (!r)
		return false;
	// The comparison must be atomic: two processors may find the entry free.
	__u64 owner = __sync_val_compare_and_swap(&r->cookie, 0, cookie);
	if (owner == 0 || owner == cookie) {
		r->peer = *p;
		return true;
	}
	if (bpf_map_update_elem(&peers, &cookie, p, BPF_NOEXIST) == 0) {
		__sync_fetch_and_add(&r->overflow, 1);
		return true;
	}
	// The socket was connected before, or there is no room.
	return bpf_map_update_elem(&peers, &cookie, p, BPF_EXIST) == 0;
}

inline struct peer *find_peer(struct recent *r, __u64 cookie)
{
	if (r->cookie == cookie)
		return &r->peer;
	return r->overflow ? bpf_map_lookup_elem(&peers, &cookie) : NULL;
}

inline void forget_peer(struct recent *r, __u64 cookie)
{
	if (r->cookie == cookie)
		r->cookie = 0;
	if (r->overflow && bpf_map_delete_elem(&peers, &cookie) == 0)
		__sync_fetch_and_add(&r->overflow, -1);
}

// EACH_FLOW is a loop over the numbers of a socket's flows. It is unrolled because the verifier of Linux 6.12
// and older finds no end of a loop that counts in memory.
#define EACH_FLOW(n) _Pragma("unroll") for (__u32 n = 0; n < FLOWS_OF_SOCKET; n++)

// forget_flows deletes the endpoint of the socket's flows to an address that the process uses itself. Such
// a flow keeps its number, because the numbers of a socket's flows have no gaps.
inline void forget_flows(struct bpf_sock_addr *ctx, struct endpoint to)
{
	struct flow_key k = {.cookie = bpf_get_socket_cookie(ctx)};
	to.protocol = 0;
	EACH_FLOW(n) {
		k.number = n;
		struct peer *flow = bpf_map_lookup_elem(&flows, &k);
		if (!flow)
			return;
		if (same(&flow->endpoint, &to))
			flow->endpoint = (struct endpoint){};
	}
}

// flows_of returns the number of flows of a network namespace, which is never NULL. The cookies of
// namespaces are numbered in sequence, and the golden ratio spreads them.
inline __u64 *flows_of(__u64 netns)
{
	__u32 k = (netns * 0x9e3779b97f4a7c15ULL >> 32) * namespaces_size >> 32;
	return bpf_map_lookup_elem(&namespaces, &k);
}

inline int connect(struct bpf_sock_addr *ctx, bool v6)
{
	struct choice c = {};
	struct peer p = {};
	if (ctx->protocol == IPPROTO_UDP)
		p.service.protocol = IPPROTO_UDP;
	else if (ctx->protocol != IPPROTO_TCP)
		return 1;
	read_peer(ctx, v6, &p.service);
	if (choose_pool(ctx, v6, &p.service, &c) && choose_endpoint(&c, &p.endpoint) && store_peer(ctx, &p)) {
		write_peer(ctx, v6, &p.endpoint);
		count(&c);
	} else {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		struct recent *r = recent_of(cookie);
		if (r)
			forget_peer(r, cookie);
		p.endpoint = p.service;
	}
	if (p.service.protocol == IPPROTO_UDP)
		forget_flows(ctx, p.endpoint);
	return 1;
}

// send finds the endpoint of a datagram to p->service. It reports whether there is one.
inline bool send(struct bpf_sock_addr *ctx, bool v6, struct peer *p)
{
	struct choice c = {};
	struct flow_key k = {.cookie = bpf_get_socket_cookie(ctx)}, other = k;
	struct peer *flow;
	__u64 flags = BPF_NOEXIST;
	if (!choose_pool(ctx, v6, &p->service, &c))
		return false;
	if (connected(ctx)) {
		// The kernel delivers answers of the socket's peer alone.
		struct recent *r = recent_of(k.cookie);
		struct peer *own = r ? find_peer(r, k.cookie) : NULL;
		if (!own || !same(&own->service, &p->service))
			return false;
		p->endpoint = own->endpoint;
		return true;
	}
	bool known = false, room = false;
	EACH_FLOW(n) {
		k.number = n;
		flow = bpf_map_lookup_elem(&flows, &k);
		known = flow && same(&flow->service, &p->service);
		room = !flow;
		if (known || room)
			break;
	}
	if (known) {
		p->endpoint = flow->endpoint;
		if (member(c.client.service, FLOW_MEMBER, &p->endpoint))
			return true;
		flags = BPF_EXIST;
	}
	if (!(known || room) || !choose_endpoint(&c, &p->endpoint))
		return false;
	// Answers of one endpoint for two Services could not be told apart.
	EACH_FLOW(n) {
		other.number = n;
		flow = bpf_map_lookup_elem(&flows, &other);
		if (!flow)
			break;
		if (same(&flow->endpoint, &p->endpoint) && !same(&flow->service, &p->service))
			return false;
	}
	__u64 *stored = flows_of(c.client.netns);
	if (!stored || (flags == BPF_NOEXIST && *stored >= namespace_flows))
		return false;
	if (bpf_map_update_elem(&flows, &k, p, flags) == 0) {
		if (flags == BPF_NOEXIST)
			__sync_fetch_and_add(stored, 1);
		count(&c);
		return true;
	}
	// There is no room, or another thread has stored a flow, usually to the same Service.
	flow = bpf_map_lookup_elem(&flows, &k);
	if (!flow || !same(&flow->service, &p->service))
		return false;
	p->endpoint = flow->endpoint;
	return true;
}

inline int sendmsg(struct bpf_sock_addr *ctx, bool v6)
{
	struct peer p = {.service.protocol = IPPROTO_UDP};
	read_peer(ctx, v6, &p.service);
	if (send(ctx, v6, &p)) {
		write_peer(ctx, v6, &p.endpoint);
		return 1;
	}
	forget_flows(ctx, p.service);
	if (!connected(ctx)) {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		struct recent *r = recent_of(cookie);
		struct peer *own = r ? find_peer(r, cookie) : NULL;
		p.service.protocol = 0;
		if (own && same(&own->endpoint, &p.service))
			forget_peer(r, cookie);
	}
	return 1;
}

// source replaces an endpoint's address by that of the Service: the peer's of getpeername(2), or the
// source of a datagram.
inline int source(struct bpf_sock_addr *ctx, bool v6, bool datagram)
{
	struct endpoint from = {};
	struct flow_key k = {.cookie = bpf_get_socket_cookie(ctx)};
	read_peer(ctx, v6, &from);
	if (datagram)
		EACH_FLOW(n) {
			k.number = n;
			struct peer *flow = bpf_map_lookup_elem(&flows, &k);
			if (!flow)
				break;
			if (same(&flow->endpoint, &from)) {
				write_peer(ctx, v6, &flow->service);
				return 1;
			}
		}
	struct recent *r = recent_of(k.cookie);
	struct peer *p = r ? find_peer(r, k.cookie) : NULL;
	if (p && same(&p->endpoint, &from)) // the socket may have been connected again to another address
		write_peer(ctx, v6, &p->service);
	return 1;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx) { return connect(ctx, false); }

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx) { return connect(ctx, true); }

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx) { return source(ctx, false, false); }

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx) { return source(ctx, true, false); }

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx) { return sendmsg(ctx, false); }

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx) { return sendmsg(ctx, true); }

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx) { return source(ctx, false, true); }

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx) { return source(ctx, true, true); }

// A closed socket has neither a peer nor flows.
SEC("cgroup/sock_release")
int release(struct bpf_sock *sk)
{
	if (sk->protocol != IPPROTO_TCP && sk->protocol != IPPROTO_UDP)
		return 1;
	struct flow_key k = {.cookie = bpf_get_socket_cookie(sk)};
	struct recent *r = recent_of(k.cookie);
	if (r)
		forget_peer(r, k.cookie);
	if (sk->protocol != IPPROTO_UDP)
		return 1;
	__u64 *stored = flows_of(bpf_get_netns_cookie(sk));
	EACH_FLOW(n) {
		k.number = n;
		if (!stored || bpf_map_delete_elem(&flows, &k) != 0)
			break;
		__sync_fetch_and_add(stored, -1);
	}
	return 1;
}
