package socketlb

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/go-proxier/proxier/tracker"
)

// All programs but release exist for each family. In pseudocode:
//
//	connect(socket, to):
//		if socket is neither TCP nor UDP: leave it alone
//		frontend = frontends[to]
//		if none, and addresses[to.addr] serves NodePorts:
//			frontend = frontends[any:to.port]
//		if none: leave it alone
//		if socket is in the node's network namespace:
//			if it is bound to an address that is no source in addresses: leave it alone
//			pool = frontend.node
//		else:
//			pool = frontend.pods
//		if pool is empty: leave it alone
//		if frontend.affinity != 0, clients[frontend.service, netns] is not older than that, and
//		   members[pool, its endpoint] exists:
//			endpoint = the client's
//		else:
//			endpoint = endpoints[pool, random number below its size]
//			clients[frontend.service, netns] = endpoint, if frontend.affinity != 0
//		r = recent[socket modulo the size of recent]
//		if r is free, or already the socket's:
//			r = socket, to, endpoint
//		else:
//			peers[socket] = to, endpoint; if there is no room: leave it alone
//			r.overflow++, unless peers had the socket
//		to = endpoint
//		connections[frontend.service]++
//	where it leaves the connection alone:
//		forget the socket's peer, as release does
//	in any case:
//		forget flows of the socket whose endpoint is to
//
//	getpeername(socket, peer):
//		r = recent[socket modulo the size of recent]
//		if r is the socket's:    known = r
//		else if r.overflow != 0: known = peers[socket]
//		if known, and known.endpoint == peer: peer = known.service
//
//	sendmsg(socket, to), of a UDP socket, if the process names the destination:
//		find the frontend and choose the pool, as connect does
//		if socket is connected:
//			if to is not its peer's service: leave it alone
//			to = its peer's endpoint
//			return
//		n = the first with flows[socket, n].service == to, or the first free one
//		if n is more than a socket may have: leave it alone
//		if n is free, or members[any pool, flows[socket, n].endpoint] does not exist:
//			endpoint = as connect does
//			if a flow of the socket has the endpoint and another service: leave it alone
//			if n is free: namespaces[netns]++; if that is more than a share: leave it alone
//			flows[socket, n] = to, endpoint
//			connections[frontend.service]++
//		to = flows[socket, n].endpoint
//	where it leaves the datagram alone:
//		forget flows of the socket whose endpoint is to
//		forget the socket's peer if its endpoint is to, unless the socket is connected
//
//	recvmsg(socket, from), of a UDP socket:
//		if a flow of the socket has the endpoint from: from = its service
//		else: as getpeername does
//
//	release(socket):
//		if socket is neither TCP nor UDP: return
//		r = recent[socket modulo the size of recent]
//		free r, if it is the socket's
//		if r.overflow != 0: delete peers[socket], and r.overflow-- if it existed
//		delete all flows of the socket; namespaces[netns]-- for each
//
// A connection that is left alone goes to the backend behind. So does a connection for which
// a lookup fails, such as the lookup of a slot that is being removed.
//
// A flow that is forgotten has no endpoint, and keeps its number: the numbers of a socket's flows
// have no gaps.

// Fields of struct bpf_sock_addr and struct bpf_sock (include/uapi/linux/bpf.h).
const (
	ctxIP4       = 4
	ctxIP6       = 8
	ctxPort      = 24
	ctxProtocol  = 36
	ctxSocket    = 64
	sockProtocol = 12
	sockIP4      = 24
	sockIP6      = 28
	sockState    = 72

	// stateConnected is the state of a connected socket, of UDP, too (TCP_ESTABLISHED).
	stateConnected = 1

	protocolTCP = 6
	protocolUDP = 17
)

// Variables on the stack, by their offset from the frame pointer. They have the types of
// keys and values of maps.
const (
	stackPeer     = -40              // peer
	stackTo       = stackPeer        // peer.Service, which is a frontendKey, too
	stackEndpoint = stackPeer + 20   // peer.Endpoint
	stackKey      = stackPeer - 24   // frontendKey, or an address
	stackSlot     = stackKey - 16    // slotKey
	stackMember   = stackSlot - 32   // memberKey
	stackClient   = stackMember - 16 // clientKey
	stackVisit    = stackClient - 32 // client
	stackNow      = stackVisit - 8   // uint64
	stackCounter  = stackNow - 8     // uint32
	stackCookie   = stackCounter - 8 // uint64
	stackRecent   = stackCookie - 8  // uint32, a key of recent or namespaces
	stackFlow     = stackRecent - 16 // flowKey
	stackOther    = stackFlow - 16   // flowKey
	stackFlags    = stackOther - 8   // uint32, for the update of a flow
)

// Fields of a recentPeer.
const (
	atCookie   = 0
	atOverflow = 8
	atPeer     = 16
)

// Registers that keep their values across calls.
const (
	sockAddr = asm.R6 // pointer to a struct bpf_sock_addr
	frontend = asm.R7 // pointer to a frontendValue
	target   = asm.R8 // later a pointer to a client or a recentPeer
	size     = asm.R9
)

// mappedWord is the third word of an IPv4-mapped IPv6 address in memory.
var mappedWord = int64(int32(binary.NativeEndian.Uint32([]byte{0, 0, 0xff, 0xff})))

// program is a program under construction.
type program struct {
	maps *bpfMaps
	// ip is the offset of the context's address, and words the number of its words. source
	// is the offset of the address to which the socket is bound.
	ip, source int16
	words      int
	code       asm.Instructions
}

func newProgram(f tracker.Family, m *bpfMaps) *program {
	if f == tracker.IPv6 {
		return &program{maps: m, ip: ctxIP6, source: sockIP6, words: 4}
	}
	return &program{maps: m, ip: ctxIP4, source: sockIP4, words: 1}
}

func (p *program) add(code ...asm.Instruction) { p.code = append(p.code, code...) }

// label makes the next instruction the target of jumps.
func (p *program) label(name string, next asm.Instruction) { p.add(next.WithSymbol(name)) }

// lookup calls bpf_map_lookup_elem. Then R0 is the pointer to the value, or 0.
func (p *program) lookup(m *ebpf.Map, key int32) {
	p.add(
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, key),
		asm.FnMapLookupElem.Call(),
	)
}

// update calls bpf_map_update_elem. R0 is 0 if it succeeded.
func (p *program) update(m *ebpf.Map, key, value int32, flags ebpf.MapUpdateFlags) {
	p.updateWith(m, key, value, asm.Mov.Imm(asm.R4, int32(flags)))
}

// updateWith calls bpf_map_update_elem with the flags that an instruction loads into R4.
func (p *program) updateWith(m *ebpf.Map, key, value int32, flags asm.Instruction) {
	p.add(
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, key),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, value),
		flags,
		asm.FnMapUpdateElem.Call(),
	)
}

// delete calls bpf_map_delete_elem. R0 is 0 if the entry existed.
func (p *program) delete(m *ebpf.Map, key int32) {
	p.add(
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, key),
		asm.FnMapDeleteElem.Call(),
	)
}

// increment adds 1 to the number at R0, or jumps to a label if R0 is 0.
func (p *program) increment(missing string) {
	p.add(
		asm.JEq.Imm(asm.R0, 0, missing),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
		asm.Add.Imm(asm.R1, 1),
		asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
	)
}

// copyWords copies n words by way of R1.
func (p *program) copyWords(dst asm.Register, to int16, src asm.Register, from int16, n int) {
	for i := range int16(n) {
		p.add(
			asm.LoadMem(asm.R1, src, from+4*i, asm.Word),
			asm.StoreMem(dst, to+4*i, asm.R1, asm.Word),
		)
	}
}

// readAddr copies an address of the program's family to the stack, as 16 bytes.
func (p *program) readAddr(to int16, src asm.Register, from int16) {
	if p.words == 1 {
		p.add(
			asm.StoreImm(asm.RFP, to, 0, asm.Word),
			asm.StoreImm(asm.RFP, to+4, 0, asm.Word),
			asm.StoreImm(asm.RFP, to+8, mappedWord, asm.Word),
		)
		to += 12
	}
	p.copyWords(asm.RFP, to, src, from, p.words)
}

// writePeer sets the context's address and port to an endpoint in memory.
func (p *program) writePeer(src asm.Register, from int16) {
	p.copyWords(sockAddr, p.ip, src, from+int16(16-4*p.words), p.words)
	p.add(
		asm.LoadMem(asm.R1, src, from+16, asm.Half),
		asm.StoreMem(sockAddr, ctxPort, asm.R1, asm.Word),
	)
}

// connect returns the program that translates new connections. host is the cookie of the
// node's network namespace.
func connect(f tracker.Family, m *bpfMaps, host uint64) asm.Instructions {
	p := newProgram(f, m)
	p.add(
		asm.Mov.Reg(sockAddr, asm.R1),
		asm.StoreImm(asm.RFP, stackTo+18, 0, asm.Half),
		asm.LoadMem(asm.R1, sockAddr, ctxProtocol, asm.Word),
		asm.JEq.Imm(asm.R1, protocolTCP, "read"),
		asm.JNE.Imm(asm.R1, protocolUDP, "allow"),
		asm.StoreImm(asm.RFP, stackTo+18, protocolUDP, asm.Half),
	)
	p.label("read", asm.Mov.Imm(asm.R0, 0))
	p.readDestination()
	p.findFrontend()
	p.choosePool(host)
	p.setKeys()
	p.chooseEndpoint()

	p.storePeer()
	p.writePeer(asm.RFP, stackEndpoint)
	p.count("translated")
	p.label("translated", asm.Mov.Imm(asm.R0, 0))
	p.copyWords(asm.RFP, stackTo, asm.RFP, stackEndpoint, 5)
	p.add(asm.Ja.Label("flows"))

	p.label("leave", asm.Mov.Imm(asm.R0, 0))
	p.findRecent("allow")
	p.forgetPeer("flows")
	p.label("flows", asm.LoadMem(asm.R1, sockAddr, ctxProtocol, asm.Word))
	p.add(asm.JNE.Imm(asm.R1, protocolUDP, "allow"))
	p.forgetFlows("allow")
	p.label("allow", asm.Mov.Imm(asm.R0, 1))
	p.add(asm.Return())
	return p.code
}

// sendmsg returns the program that translates the datagrams of unconnected UDP sockets.
func sendmsg(f tracker.Family, m *bpfMaps, host uint64) asm.Instructions {
	p := newProgram(f, m)
	p.add(
		asm.Mov.Reg(sockAddr, asm.R1),
		asm.StoreImm(asm.RFP, stackTo+18, protocolUDP, asm.Half),
	)
	p.readDestination()
	p.findFrontend()
	p.choosePool(host)
	p.setKeys()

	p.ifConnected("unconnected")
	p.findRecent("allow")
	p.findPeer("leave")
	p.unless(target, 0, stackTo, "leave")
	p.copyWords(asm.RFP, stackEndpoint, target, 20, 5)
	p.add(asm.Ja.Label("send"))

	// The endpoint of the datagrams before this one.
	p.label("unconnected", asm.StoreImm(asm.RFP, stackFlags, int64(ebpf.UpdateExist), asm.Word))
	p.eachFlow(stackFlow, "new", func(next string) {
		p.unless(asm.R0, 0, stackTo, next)
		p.add(asm.Ja.Label("known"))
	})
	p.add(asm.Ja.Label("leave"))
	p.label("known", asm.StoreImm(asm.RFP, stackMember+8, flowMember, asm.Word))
	p.copyWords(asm.RFP, stackEndpoint, asm.R0, 20, 5)
	p.copyWords(asm.RFP, stackMember+12, asm.R0, 20, 5)
	p.lookup(m.members, stackMember)
	p.add(
		asm.StoreMem(asm.RFP, stackMember+8, target, asm.Word),
		asm.JNE.Imm(asm.R0, 0, "send"),
		asm.Ja.Label("choose"),
	)
	p.label("new", asm.StoreImm(asm.RFP, stackFlags, int64(ebpf.UpdateNoExist), asm.Word))
	p.label("choose", asm.Mov.Imm(asm.R0, 0))
	p.chooseEndpoint()

	p.label("translate", asm.Mov.Imm(asm.R0, 0))
	p.eachFlow(stackOther, "single", func(next string) {
		p.unless(asm.R0, 20, stackEndpoint, next)
		p.unless(asm.R0, 0, stackTo, "leave")
	})
	p.label("single", asm.LoadMem(asm.R0, asm.RFP, stackClient+8, asm.DWord)) // clientKey.NetNS
	p.findNamespace("leave")
	p.add(
		asm.LoadMem(asm.R1, asm.RFP, stackFlags, asm.Word),
		asm.JNE.Imm(asm.R1, int32(ebpf.UpdateNoExist), "store"),
		asm.LoadMem(asm.R1, size, 0, asm.DWord),
		asm.JGE.Imm(asm.R1, int32(max(1, m.flows.MaxEntries()/namespaceShare)), "leave"),
	)
	p.label("store", asm.Mov.Imm(asm.R0, 0))
	p.updateWith(m.flows, stackFlow, stackPeer, asm.LoadMem(asm.R4, asm.RFP, stackFlags, asm.Word))
	p.add(
		asm.JNE.Imm(asm.R0, 0, "lost"),
		asm.LoadMem(asm.R1, asm.RFP, stackFlags, asm.Word),
		asm.JNE.Imm(asm.R1, int32(ebpf.UpdateNoExist), "counted"),
		asm.AddAtomic.Mem(size, asm.R1, asm.DWord, 0), // 1
	)
	p.label("counted", asm.Mov.Imm(asm.R0, 0))
	p.count("send")
	p.label("send", asm.Mov.Imm(asm.R0, 0))
	p.writePeer(asm.RFP, stackEndpoint)
	p.add(asm.Ja.Label("allow"))

	// There is no room, or another thread has stored a flow, as a rule to the same Service.
	p.label("lost", asm.Mov.Imm(asm.R0, 0))
	p.lookup(m.flows, stackFlow)
	p.add(asm.JEq.Imm(asm.R0, 0, "leave"))
	p.unless(asm.R0, 0, stackTo, "leave")
	p.copyWords(asm.RFP, stackEndpoint, asm.R0, 20, 5)
	p.add(asm.Ja.Label("send"))

	p.label("leave", asm.Mov.Imm(asm.R0, 0))
	p.forgetFlows("peer")
	p.label("peer", asm.Mov.Imm(asm.R0, 0))
	p.ifConnected("disconnected")
	p.add(asm.Ja.Label("allow"))
	p.label("disconnected", asm.Mov.Imm(asm.R0, 0))
	p.findRecent("allow")
	p.add(asm.Mov.Reg(frontend, target))
	p.findPeer("allow")
	p.unless(target, 20, stackTo, "allow")
	p.add(asm.Mov.Reg(target, frontend))
	p.forgetPeer("allow")
	p.label("allow", asm.Mov.Imm(asm.R0, 1)) // the datagram
	p.add(asm.Return())
	return p.code
}

// ifConnected jumps to a label unless the context's socket is connected.
func (p *program) ifConnected(otherwise string) {
	p.add(
		asm.LoadMem(asm.R1, sockAddr, ctxSocket, asm.DWord),
		asm.JEq.Imm(asm.R1, 0, otherwise),
		asm.LoadMem(asm.R1, asm.R1, sockState, asm.Word),
		asm.JNE.Imm(asm.R1, stateConnected, otherwise),
	)
}

// unless jumps to a label unless an endpoint in memory equals one on the stack.
func (p *program) unless(src asm.Register, from, stack int16, otherwise string) {
	for i := range int16(5) {
		p.add(
			asm.LoadMem(asm.R1, src, from+4*i, asm.Word),
			asm.LoadMem(asm.R2, asm.RFP, stack+4*i, asm.Word),
			asm.JNE.Reg(asm.R1, asm.R2, otherwise),
		)
	}
}

// eachFlow loads a pointer to each flow of the context's socket into R0, and its key into the
// stack at key, for the code that each adds. That code continues with the next flow at a label. After
// the last flow, the program jumps to the label done, or continues if the socket has all the flows
// that it may have.
func (p *program) eachFlow(key int32, done string, each func(next string)) {
	p.add(
		asm.Mov.Reg(asm.R1, sockAddr),
		asm.FnGetSocketCookie.Call(),
		asm.StoreMem(asm.RFP, int16(key), asm.R0, asm.DWord),
		asm.StoreImm(asm.RFP, int16(key)+12, 0, asm.Word),
	)
	for n := range socketFlows {
		next := fmt.Sprint(done, n)
		p.add(asm.StoreImm(asm.RFP, int16(key)+8, int64(n), asm.Word))
		p.lookup(p.maps.flows, key)
		p.add(asm.JEq.Imm(asm.R0, 0, done))
		each(next)
		p.label(next, asm.Mov.Imm(asm.R0, 0))
	}
}

// forgetFlows deletes the endpoint of the socket's flows to it: the process uses the address at
// stackTo itself. Then it continues at the label done.
func (p *program) forgetFlows(done string) {
	p.add(asm.StoreImm(asm.RFP, stackTo+18, 0, asm.Half)) // an endpoint has no protocol
	p.eachFlow(stackOther, done, func(next string) {
		p.unless(asm.R0, 20, stackTo, next)
		for i := range int16(5) {
			p.add(asm.StoreImm(asm.R0, 20+4*i, 0, asm.Word))
		}
	})
	p.add(asm.Ja.Label(done))
}

// findNamespace loads a pointer to the number of flows of a network namespace into size, or jumps to
// a label. R0 has the namespace's cookie.
func (p *program) findNamespace(missing string) {
	p.add(
		// Cookies are numbered in sequence. The golden ratio spreads them.
		asm.LoadImm(asm.R1, -0x61c8864680b583eb, asm.DWord),
		asm.Mul.Reg(asm.R0, asm.R1),
		asm.RSh.Imm(asm.R0, 32),
		asm.Mul.Imm(asm.R0, int32(p.maps.namespaces.MaxEntries())),
		asm.RSh.Imm(asm.R0, 32),
		asm.StoreMem(asm.RFP, stackRecent, asm.R0, asm.Word),
	)
	p.lookup(p.maps.namespaces, stackRecent)
	p.add(
		asm.JEq.Imm(asm.R0, 0, missing), // for the verifier
		asm.Mov.Reg(size, asm.R0),
	)
}

// readDestination copies the destination to stackTo, but for the protocol.
func (p *program) readDestination() {
	p.readAddr(stackTo, sockAddr, p.ip)
	p.add(
		asm.LoadMem(asm.R1, sockAddr, ctxPort, asm.Word),
		asm.StoreMem(asm.RFP, stackTo+16, asm.R1, asm.Half),
	)
}

// count counts the connection, and then continues at the label that follows.
func (p *program) count(next string) {
	p.lookup(p.maps.counters, stackCounter)
	p.increment(next)
	p.lookup(p.maps.connections, stackSlot) // slotKey.Service
	p.increment("first")
	p.add(asm.Ja.Label(next))
	p.label("first", asm.Mov.Imm(asm.R1, 1))
	p.add(asm.StoreMem(asm.RFP, stackNow, asm.R1, asm.DWord))
	p.update(p.maps.connections, stackSlot, stackNow, ebpf.UpdateAny)
}

// findFrontend looks up the destination's frontend.
func (p *program) findFrontend() {
	p.lookup(p.maps.frontends, stackTo)
	p.add(asm.JNE.Imm(asm.R0, 0, "found"))
	p.lookup(p.maps.addresses, stackTo)
	p.add(
		asm.JEq.Imm(asm.R0, 0, "leave"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.Word), // address.NodePorts
		asm.JEq.Imm(asm.R1, 0, "leave"),
		asm.LoadMem(asm.R1, asm.R0, 8, asm.Word), // address.Family
		asm.StoreImm(asm.RFP, stackKey, 0, asm.Word),
		asm.StoreImm(asm.RFP, stackKey+4, 0, asm.Word),
		asm.StoreMem(asm.RFP, stackKey+8, asm.R1, asm.Word),
		asm.StoreImm(asm.RFP, stackKey+12, 0, asm.Word),
	)
	p.copyWords(asm.RFP, stackKey+16, asm.RFP, stackTo+16, 1)
	p.lookup(p.maps.frontends, stackKey)
	p.add(asm.JEq.Imm(asm.R0, 0, "leave"))
	p.label("found", asm.Mov.Reg(frontend, asm.R0))
}

// choosePool loads the pool of the node if the socket is in the node's network namespace, or
// else the pool of pods.
func (p *program) choosePool(host uint64) {
	p.add(
		asm.Mov.Reg(asm.R1, sockAddr),
		asm.FnGetNetnsCookie.Call(),
		asm.StoreMem(asm.RFP, stackClient+8, asm.R0, asm.DWord), // clientKey.NetNS
		asm.StoreImm(asm.RFP, stackCounter, counterPods, asm.Word),
		asm.LoadMem(target, frontend, 24, asm.Word), // frontendValue.Pods
		asm.LoadMem(size, frontend, 28, asm.Word),
		asm.LoadImm(asm.R1, int64(host), asm.DWord),
		asm.JNE.Reg(asm.R0, asm.R1, "chosen"),

		asm.StoreImm(asm.RFP, stackCounter, counterNode, asm.Word),
		asm.LoadMem(target, frontend, 16, asm.Word), // frontendValue.Node
		asm.LoadMem(size, frontend, 20, asm.Word),
		asm.LoadMem(asm.R2, sockAddr, ctxSocket, asm.DWord),
		asm.JEq.Imm(asm.R2, 0, "leave"),
	)
	p.readAddr(stackKey, asm.R2, p.source)
	for i := range int16(p.words) {
		p.add(
			asm.LoadMem(asm.R1, asm.RFP, stackKey+12-4*i, asm.Word),
			asm.JNE.Imm(asm.R1, 0, "bound"),
		)
	}
	p.add(asm.Ja.Label("chosen"))
	p.label("bound", asm.Mov.Imm(asm.R0, 0))
	p.lookup(p.maps.addresses, stackKey)
	p.add(
		asm.JEq.Imm(asm.R0, 0, "leave"),
		asm.LoadMem(asm.R1, asm.R0, 4, asm.Word), // address.Source
		asm.JEq.Imm(asm.R1, 0, "leave"),
	)
	p.label("chosen", asm.JEq.Imm(size, 0, "leave"))
}

// setKeys sets the Service and the pool in the keys on the stack.
func (p *program) setKeys() {
	p.add(
		asm.LoadMem(asm.R1, frontend, 0, asm.DWord), // frontendValue.Service
		asm.StoreMem(asm.RFP, stackSlot, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, stackMember, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, stackClient, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, stackSlot+8, target, asm.Word),
		asm.StoreMem(asm.RFP, stackMember+8, target, asm.Word),
	)
}

// chooseEndpoint writes an endpoint to stackEndpoint and continues at the label translate.
func (p *program) chooseEndpoint() {
	p.add(
		asm.LoadMem(asm.R1, frontend, 8, asm.DWord), // frontendValue.Affinity
		asm.JEq.Imm(asm.R1, 0, "pick"),
	)
	// The endpoint of the client's last connection.
	p.lookup(p.maps.clients, stackClient)
	p.add(
		asm.JEq.Imm(asm.R0, 0, "pick"),
		asm.Mov.Reg(target, asm.R0),
		asm.FnKtimeGetNs.Call(),
		asm.StoreMem(asm.RFP, stackNow, asm.R0, asm.DWord),
		asm.LoadMem(asm.R1, target, 0, asm.DWord), // client.Seen
		asm.Sub.Reg(asm.R0, asm.R1),
		asm.LoadMem(asm.R1, frontend, 8, asm.DWord),
		asm.JSGE.Reg(asm.R0, asm.R1, "pick"),
	)
	p.copyWords(asm.RFP, stackMember+12, target, 8, 5)
	p.lookup(p.maps.members, stackMember)
	p.add(
		asm.JEq.Imm(asm.R0, 0, "pick"),
		asm.LoadMem(asm.R1, asm.RFP, stackNow, asm.DWord),
		asm.StoreMem(target, 0, asm.R1, asm.DWord),
	)
	p.copyWords(asm.RFP, stackEndpoint, asm.RFP, stackMember+12, 5)
	p.add(asm.Ja.Label("translate"))

	// Any endpoint.
	p.label("pick", asm.FnGetPrandomU32.Call())
	p.add(
		asm.Mul.Reg(asm.R0, size),
		asm.RSh.Imm(asm.R0, 32),
		asm.StoreMem(asm.RFP, stackSlot+12, asm.R0, asm.Word),
	)
	p.lookup(p.maps.endpoints, stackSlot)
	p.add(asm.JEq.Imm(asm.R0, 0, "leave"))
	p.copyWords(asm.RFP, stackEndpoint, asm.R0, 0, 5)
	p.add(
		asm.LoadMem(asm.R1, frontend, 8, asm.DWord),
		asm.JEq.Imm(asm.R1, 0, "translate"),
		asm.FnKtimeGetNs.Call(),
		asm.StoreMem(asm.RFP, stackVisit, asm.R0, asm.DWord),
		asm.StoreImm(asm.RFP, stackVisit+28, 0, asm.Word),
	)
	p.copyWords(asm.RFP, stackVisit+8, asm.RFP, stackEndpoint, 5)
	p.update(p.maps.clients, stackClient, stackVisit, ebpf.UpdateAny)
}

// findRecent loads a pointer to the recentPeer of the context's socket into target, and the
// socket's cookie into R2. The jump to the label missing is for the verifier.
func (p *program) findRecent(missing string) {
	p.add(
		asm.Mov.Reg(asm.R1, sockAddr),
		asm.FnGetSocketCookie.Call(),
		asm.StoreMem(asm.RFP, stackCookie, asm.R0, asm.DWord),
		asm.And.Imm(asm.R0, int32(p.maps.recent.MaxEntries()-1)),
		asm.StoreMem(asm.RFP, stackRecent, asm.R0, asm.Word),
	)
	p.lookup(p.maps.recent, stackRecent)
	p.add(
		asm.JEq.Imm(asm.R0, 0, missing),
		asm.Mov.Reg(target, asm.R0),
		asm.LoadMem(asm.R2, asm.RFP, stackCookie, asm.DWord),
	)
}

// storePeer stores the peer on the stack for getpeername, or leaves the connection alone if there
// is no room.
func (p *program) storePeer() {
	p.label("translate", asm.Mov.Imm(asm.R0, 0))
	p.findRecent("leave")
	p.add(
		// The comparison must be atomic: two processors may find it free.
		asm.Mov.Imm(asm.R0, 0),
		compareAndSwap(target, asm.R2, atCookie),
		asm.JEq.Imm(asm.R0, 0, "own"),
		asm.JEq.Reg(asm.R0, asm.R2, "own"),
	)
	p.update(p.maps.peers, stackCookie, stackPeer, ebpf.UpdateNoExist)
	p.add(
		asm.JNE.Imm(asm.R0, 0, "again"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(target, asm.R1, asm.DWord, atOverflow),
		asm.Ja.Label("stored"),
	)
	// The socket was connected before, or there is no room.
	p.label("again", asm.Mov.Imm(asm.R0, 0))
	p.update(p.maps.peers, stackCookie, stackPeer, ebpf.UpdateExist)
	p.add(
		asm.JNE.Imm(asm.R0, 0, "leave"),
		asm.Ja.Label("stored"),
	)
	p.label("own", asm.Mov.Imm(asm.R0, 0))
	for i := range int16(5) {
		p.add(
			asm.LoadMem(asm.R1, asm.RFP, stackPeer+8*i, asm.DWord),
			asm.StoreMem(target, atPeer+8*i, asm.R1, asm.DWord),
		)
	}
	p.label("stored", asm.Mov.Imm(asm.R0, 0))
}

// compareAndSwap stores src in memory if that has the value of R0. R0 is the value before it.
func compareAndSwap(dst, src asm.Register, offset int16) asm.Instruction {
	i := asm.CmpXchg.Mem(dst, src, asm.DWord, offset)
	// github.com/cilium/ebpf 0.22 writes Constant, and so an addition if it is 0.
	i.Constant = int64(asm.CmpXchg >> 8)
	return i
}

// findPeer follows findRecent. It loads a pointer to the socket's peer into target, or jumps to a
// label.
func (p *program) findPeer(missing string) {
	found := "found, else " + missing
	p.add(
		asm.LoadMem(asm.R1, target, atCookie, asm.DWord),
		asm.Mov.Reg(asm.R0, target),
		asm.Add.Imm(asm.R0, atPeer),
		asm.JEq.Reg(asm.R1, asm.R2, found),
		asm.LoadMem(asm.R1, target, atOverflow, asm.DWord),
		asm.JEq.Imm(asm.R1, 0, missing),
	)
	p.lookup(p.maps.peers, stackCookie)
	p.add(asm.JEq.Imm(asm.R0, 0, missing))
	p.label(found, asm.Mov.Reg(target, asm.R0))
}

// forgetPeer follows findRecent. It deletes the socket's peer, and continues at the label done.
func (p *program) forgetPeer(done string) {
	p.add(
		asm.LoadMem(asm.R1, target, atCookie, asm.DWord),
		asm.LoadMem(asm.R2, asm.RFP, stackCookie, asm.DWord),
		asm.JNE.Reg(asm.R1, asm.R2, "others"),
		asm.Mov.Imm(asm.R1, 0),
		asm.StoreMem(target, atCookie, asm.R1, asm.DWord),
	)
	p.label("others", asm.LoadMem(asm.R1, target, atOverflow, asm.DWord))
	p.add(asm.JEq.Imm(asm.R1, 0, done))
	p.delete(p.maps.peers, stackCookie)
	p.add(
		asm.JNE.Imm(asm.R0, 0, done),
		asm.Mov.Imm(asm.R1, -1),
		asm.AddAtomic.Mem(target, asm.R1, asm.DWord, atOverflow),
		asm.Ja.Label(done),
	)
}

// getpeername returns the program that replaces the endpoint's address by the Service's, for
// getpeername(2) or, if datagrams is set, for the source of received datagrams.
func getpeername(f tracker.Family, m *bpfMaps, datagrams bool) asm.Instructions {
	p := newProgram(f, m)
	p.add(
		asm.Mov.Reg(sockAddr, asm.R1),
		asm.StoreImm(asm.RFP, stackTo+18, 0, asm.Half),
	)
	p.readDestination()
	if datagrams {
		p.eachFlow(stackFlow, "peer", func(next string) {
			p.unless(asm.R0, 20, stackTo, next)
			p.add(asm.Mov.Reg(target, asm.R0), asm.Ja.Label("write"))
		})
		p.label("peer", asm.Mov.Imm(asm.R0, 0))
	}
	p.findRecent("leave")
	p.findPeer("leave")
	// The socket may have been connected again to another address.
	p.unless(target, 20, stackTo, "leave")
	p.label("write", asm.Mov.Imm(asm.R0, 0))
	p.writePeer(target, 0)
	p.label("leave", asm.Mov.Imm(asm.R0, 1))
	p.add(asm.Return())
	return p.code
}

// release returns the program that deletes the peer and the flows of a socket that is closed.
func release(m *bpfMaps) asm.Instructions {
	p := &program{maps: m}
	p.add(
		asm.Mov.Reg(sockAddr, asm.R1), // a struct bpf_sock in this program
		asm.LoadMem(frontend, sockAddr, sockProtocol, asm.Word),
		asm.JEq.Imm(frontend, protocolTCP, "served"),
		asm.JNE.Imm(frontend, protocolUDP, "leave"),
	)
	p.label("served", asm.Mov.Imm(asm.R0, 0))
	p.findRecent("leave")
	p.forgetPeer("flows")
	p.label("flows", asm.JNE.Imm(frontend, protocolUDP, "leave"))
	p.add(
		asm.LoadMem(asm.R1, asm.RFP, stackCookie, asm.DWord),
		asm.StoreMem(asm.RFP, stackFlow, asm.R1, asm.DWord),
		asm.StoreImm(asm.RFP, stackFlow+12, 0, asm.Word),
		asm.Mov.Reg(asm.R1, sockAddr),
		asm.FnGetNetnsCookie.Call(),
	)
	p.findNamespace("leave")
	for n := range socketFlows {
		p.add(asm.StoreImm(asm.RFP, stackFlow+8, int64(n), asm.Word))
		p.delete(m.flows, stackFlow)
		p.add(
			asm.JNE.Imm(asm.R0, 0, "leave"),
			asm.Mov.Imm(asm.R1, -1),
			asm.AddAtomic.Mem(size, asm.R1, asm.DWord, 0),
		)
	}
	p.label("leave", asm.Mov.Imm(asm.R0, 1))
	p.add(asm.Return())
	return p.code
}
