package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

// WriteMan writes the manual pages of a command and its sub-commands into a folder, as nodeproxy.8, nodeproxy-run.8
// and so on. It creates the folder. A page is the help text with the whole description of each flag.
func WriteMan(dir string, c *cobra.Command) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	name := strings.ReplaceAll(c.CommandPath(), " ", "-")
	page := fmt.Sprintf(".TH %s 8 \"\" \"nodeproxy %s\"\n.SH NAME\n%s \\- %s\n.SH DESCRIPTION\n.nf\n", strings.ToUpper(roff(name)), roff(Version()), roff(name), roff(c.Short))
	for line := range strings.Lines(helpText(c, 72, true)) {
		page += roff(line)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".8"), []byte(page), 0o644); err != nil {
		return err
	}
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			if err := WriteMan(dir, sub); err != nil {
				return err
			}
		}
	}
	return nil
}

// roff returns text with the characters escaped that roff interprets.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "µ", `\(mc`, "…", "...").Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}
