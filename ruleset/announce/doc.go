// Package announce says which external and load-balancer IPs a node serves at the moment, for BGP and ARP
// speakers beside any data plane:
//
//	vips := announce.New(func(a announce.Address) {
//		if a.Serves { ... } // announce a.Addr, or withdraw it
//	})
//	speaker := rules.Follow("speaker", vips) // rules is the cursor of the data plane
//	...
//	err := ruleset.SyncAll(ctx, rules, speaker)
//
// A [Follower] hears of what the data plane has in effect: an address is served when it is announced. It
// hears of a deleted Service when the rules are gone, so packets that routers still send are not answered.
// An endpoint that ends first terminates, and its address is withdrawn then, while it still serves.
package announce
