package main

import (
	"context"
	"io"
)

func demo(ctx context.Context, args []string, out, diag io.Writer) int { return 0 }
