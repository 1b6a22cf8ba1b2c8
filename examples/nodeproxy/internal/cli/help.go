package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"
)

// WriteHelp writes a command's help text, as wide as the terminal. Of a flag it has the first sentence:
// OPTIONS.md and the manual page have all.
func WriteHelp(w io.Writer, c *cobra.Command) {
	var out bytes.Buffer
	fmt.Fprintf(&out, "Usage: %s\n\n%s\n", usageLine(c), strings.TrimSpace(description(c)))
	for _, g := range c.Groups() {
		fmt.Fprintf(&out, "\n%s\n", g.Title)
		for _, sub := range c.Commands() {
			if sub.GroupID == g.ID && sub.IsAvailableCommand() {
				fmt.Fprintf(&out, "  %-11s %s\n", sub.Name(), sub.Short)
			}
		}
	}
	if len(c.Groups()) == 0 && c.HasAvailableSubCommands() {
		fmt.Fprint(&out, "\nCommands:\n")
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() {
				fmt.Fprintf(&out, "  %-11s %s\n", sub.Name(), sub.Short)
			}
		}
	}
	for _, s := range sections(c) {
		if s.title != "" {
			fmt.Fprintf(&out, "\nFlags, %s:\n", s.title)
		} else if s.flags.HasFlags() {
			fmt.Fprint(&out, "\nFlags:\n")
		}
		s.flags.VisitAll(func(f *pflag.Flag) { writeFlag(&out, f, columns(w)) })
	}
	_, _ = w.Write(out.Bytes())
}

// writeFlag writes a flag's name, and below it the first sentence of its description, or what is before
// the semicolon.
func writeFlag(out io.Writer, f *pflag.Flag, width int) {
	if f.Deprecated != "" {
		return
	}
	of, usage := pflag.UnquoteUsage(f)
	for _, end := range []string{"; ", ". "} {
		usage, _, _ = strings.Cut(usage, end)
	}
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	if d := defaultOf(f); d != "" {
		usage += " (default " + d + ")"
	}
	fmt.Fprintf(out, "  %s\n", strings.TrimSpace(name+" "+of))
	line := ""
	for _, word := range strings.Fields(usage) {
		if line != "" && len(indent+line+word) >= width {
			fmt.Fprintln(out, indent+line)
			line = ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	fmt.Fprintln(out, indent+line)
}

const indent = "        "

// defaultOf returns the default of a flag, unless it is a zero value.
func defaultOf(f *pflag.Flag) string {
	switch f.DefValue {
	case "false", "0", "0s", "[]":
		return ""
	}
	return f.DefValue
}

func usageLine(c *cobra.Command) string {
	if c.HasParent() {
		return c.Parent().CommandPath() + " " + c.Use
	}
	return c.Use
}

// description returns a command's long text, or else its short one.
func description(c *cobra.Command) string {
	if c.Long != "" {
		return c.Long
	}
	return c.Short
}

// columns returns the width of a terminal, or 100.
func columns(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil {
			return width
		}
	}
	return 100
}
