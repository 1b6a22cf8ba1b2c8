// Package ipvs forwards Service traffic with IPVS.
package ipvs
