package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// WriteHelp writes a command's help text. Descriptions of flags are wrapped if w is a terminal.
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
		out.WriteString(s.flags.FlagUsagesWrapped(columns(w)))
	}
	_, _ = w.Write(out.Bytes())
}

// usageLine returns the command line of a command.
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

// columns returns the width of a terminal, or 0, which means that nothing is wrapped.
func columns(w io.Writer) int {
	f, ok := w.(*os.File)
	if !ok {
		return 0
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0
	}
	return width
}
