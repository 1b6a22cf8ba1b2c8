//go:build linux && race

package nftables

const raceEnabled = true
