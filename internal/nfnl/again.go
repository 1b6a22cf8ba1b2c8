package nfnl

import (
	"context"
	"errors"
)

// attempts is how often a dump is read at most while changes interrupt it.
const attempts = 10

// Again calls read, and calls it again while its error wraps [ErrInterrupted], until ctx ends and at
// most ten times in all. It returns the error of the last call, or of ctx.
func Again(ctx context.Context, read func() error) error {
	_, err := Whole(ctx, ErrInterrupted, func() (struct{}, error) { return struct{}{}, read() })
	return err
}

// Whole is Again for a function that returns what it has read, and for the error of another library
// that means that the dump was interrupted.
func Whole[T any](ctx context.Context, interrupted error, read func() (T, error)) (out T, err error) {
	for range attempts {
		if err := ctx.Err(); err != nil {
			return out, err
		}
		if out, err = read(); !errors.Is(err, interrupted) {
			break
		}
	}
	return out, err
}
