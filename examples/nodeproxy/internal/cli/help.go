package cli

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/go-proxier/proxier/examples/internal/node/config"
)

// WriteHelp writes a command's help text, as wide as the terminal, or of 100 characters. Of a flag it has the first
// sentence: OPTIONS.md and the manual page have all.
func WriteHelp(w io.Writer, c *cobra.Command) {
	width := 100
	if f, ok := w.(*os.File); ok {
		if columns, _, err := term.GetSize(int(f.Fd())); err == nil {
			width = columns
		}
	}
	_, _ = io.WriteString(w, helpText(c, width, false))
}

// helpText returns a command's help text, with the whole description of each flag or its first sentence.
func helpText(c *cobra.Command, width int, whole bool) string {
	var out strings.Builder
	usage := c.Use
	if c.HasParent() {
		usage = c.Parent().CommandPath() + " " + c.Use
	}
	fmt.Fprintf(&out, "Usage: %s\n\n%s\n", usage, strings.TrimSpace(cmp.Or(c.Long, c.Short)))
	groups := c.Groups()
	if len(groups) == 0 && c.HasAvailableSubCommands() {
		groups = []*cobra.Group{{Title: "Commands:"}}
	}
	for _, g := range groups {
		fmt.Fprintf(&out, "\n%s\n", g.Title)
		for _, sub := range c.Commands() {
			if sub.GroupID == g.ID && sub.IsAvailableCommand() {
				fmt.Fprintf(&out, "  %-11s %s\n", sub.Name(), sub.Short)
			}
		}
	}
	// The command's own flags come first, then those of the agent's configuration in their groups.
	titles, flags := []string{"own"}, map[string][]*pflag.Flag{}
	c.Flags().VisitAll(func(f *pflag.Flag) {
		title := "own"
		if group := f.Annotations[config.GroupAnnotation]; len(group) != 0 {
			title = group[0]
		}
		if f.Hidden || f.Deprecated != "" {
			return
		}
		if len(flags[title]) == 0 && title != "own" {
			titles = append(titles, title)
		}
		flags[title] = append(flags[title], f)
	})
	if own := flags["own"]; len(own) == 1 && own[0].Name == "help" && len(titles) > 1 {
		flags[titles[1]] = append(flags[titles[1]], own...)
		titles = titles[1:]
	}
	for _, title := range titles {
		switch {
		case len(flags[title]) == 0:
			continue
		case len(titles) == 1:
			fmt.Fprint(&out, "\nFlags:\n")
		case title == "own":
			fmt.Fprintf(&out, "\nFlags, %s's own:\n", c.Name())
		default:
			fmt.Fprintf(&out, "\nFlags, %s:\n", title)
		}
		for _, f := range flags[title] {
			writeFlag(&out, f, width, whole)
		}
	}
	return out.String()
}

// writeFlag writes a flag's name, and below it its description, or what is before the first semicolon or the end of
// the first sentence, and its default unless that is a zero value.
func writeFlag(out io.Writer, f *pflag.Flag, width int, whole bool) {
	of, usage := pflag.UnquoteUsage(f)
	for _, end := range []string{"; ", ". "} {
		if !whole {
			usage, _, _ = strings.Cut(usage, end)
		}
	}
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	switch f.DefValue {
	case "", "false", "0", "0s", "[]":
	default:
		usage += " (default " + f.DefValue + ")"
	}
	fmt.Fprintf(out, "  %s\n", strings.TrimSpace(name+" "+of))
	const indent = "        "
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
