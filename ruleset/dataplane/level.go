package dataplane

import "log/slog"

// LevelTransaction is the level at which the backends of packages nftables, iptables and ipvs log each
// transaction before they commit it, as text that the field's tools read: nft, iptables-restore, or for IPVS,
// where each write is one, ipvsadm, ipset and ip. It is below
// [slog.LevelDebug], because the first transaction has every Service of the cluster. With logr it is
// verbosity 8, so "nodeproxy run -v=8" shows them.
const LevelTransaction slog.Level = -8
