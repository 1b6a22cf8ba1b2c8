// Package kernel commits transactions of package model, and reads tables back. On systems other than
// Linux it has only the rules and the lists of elements.
//
// A [Writer] encodes a model.Tx as an [nft.Batch]. [Rules] has the chains that the objects of a Tx stand
// for, in the syntax of nft, which package nft encodes.
package kernel
