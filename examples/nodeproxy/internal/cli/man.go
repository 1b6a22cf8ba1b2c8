package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// manSection is the section of the manual for programs of administrators.
const manSection = "8"

// WriteMan writes the manual pages of a command and its sub-commands into a folder, as
// nodeproxy.8, nodeproxy-run.8 and so on. It creates the folder.
func WriteMan(dir string, c *cobra.Command) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, pageName(c)+"."+manSection), manPage(c), 0o644); err != nil {
		return err
	}
	for _, sub := range c.Commands() {
		if !sub.IsAvailableCommand() {
			continue
		}
		if err := WriteMan(dir, sub); err != nil {
			return err
		}
	}
	return nil
}

// pageName returns the name of a command's manual page.
func pageName(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

// manPage returns a command's manual page for the macros of man(7).
func manPage(c *cobra.Command) []byte {
	var out bytes.Buffer
	name := pageName(c)
	fmt.Fprintf(&out, ".TH %s %s \"\" \"nodeproxy %s\"\n", strings.ToUpper(roff(name)), manSection, roff(Version()))
	fmt.Fprintf(&out, ".SH NAME\n%s \\- %s\n", roff(name), roff(c.Short))
	fmt.Fprintf(&out, ".SH SYNOPSIS\n.B %s\n", roff(usageLine(c)))
	fmt.Fprint(&out, ".SH DESCRIPTION\n")
	writeParagraphs(&out, description(c))
	for _, s := range sections(c) {
		if !s.flags.HasFlags() {
			continue
		}
		title := "OPTIONS"
		if s.title != "" {
			title += ", " + s.title
		}
		fmt.Fprintf(&out, ".SH \"%s\"\n", roff(title))
		s.flags.VisitAll(func(f *pflag.Flag) { writeOption(&out, f) })
	}
	var others []string
	if c.HasParent() {
		others = append(others, pageName(c.Parent()))
	}
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			others = append(others, pageName(sub))
		}
	}
	if len(others) > 0 {
		fmt.Fprint(&out, ".SH SEE ALSO\n")
		for i, o := range others {
			end := ","
			if i == len(others)-1 {
				end = ""
			}
			fmt.Fprintf(&out, ".BR %s (%s)%s\n", roff(o), manSection, end)
		}
	}
	return out.Bytes()
}

// writeOption writes a flag with its description and default.
func writeOption(out *bytes.Buffer, f *pflag.Flag) {
	value, usage := pflag.UnquoteUsage(f)
	head := "--" + f.Name
	if f.Shorthand != "" {
		head = "-" + f.Shorthand + ", " + head
	}
	fmt.Fprintf(out, ".TP\n\\fB%s\\fR", roff(head))
	if value != "" {
		fmt.Fprintf(out, " \\fI%s\\fR", roff(value))
	}
	fmt.Fprintf(out, "\n%s.\n", roff(strings.TrimSuffix(usage, ".")))
	if d := defaultOf(f); d != "" {
		fmt.Fprintf(out, "The default is %s.\n", roff(d))
	}
}

// writeParagraphs writes a text whose paragraphs have empty lines between them. A paragraph with
// indented lines keeps its lines.
func writeParagraphs(out *bytes.Buffer, text string) {
	for i, paragraph := range strings.Split(strings.TrimSpace(text), "\n\n") {
		if i > 0 {
			fmt.Fprintln(out, ".PP")
		}
		asIs := strings.HasPrefix(paragraph, "  ") || strings.Contains(paragraph, "\n  ")
		if asIs {
			fmt.Fprintln(out, ".nf")
		}
		for line := range strings.SplitSeq(strings.TrimRight(paragraph, "\n"), "\n") {
			fmt.Fprintln(out, roff(line))
		}
		if asIs {
			fmt.Fprintln(out, ".fi")
		}
	}
}

// roff returns text with the characters escaped that roff interprets.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "µ", `\(mc`, "…", "...").Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}
