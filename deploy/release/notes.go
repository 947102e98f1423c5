package main

import (
	"fmt"
	"os"
	"strings"
)

const notesFile = "notes.md"

// unreleased is the heading in CHANGELOG.md of what has changed since the last release.
const unreleased = "Unreleased"

// notes cuts the newest section out of CHANGELOG.md.
func (r *release) notes() error {
	log, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return err
	}
	text, err := notes(string(log), r.version, r.tagged)
	if err != nil {
		return err
	}
	return r.write(notesFile, []byte(text))
}

// notes returns the text of the newest section, which must be that of the version. Until that is tagged, it may be the
// unreleased one.
func notes(log, version string, tagged bool) (string, error) {
	_, section, _ := strings.Cut(log, "\n## ")
	heading, text, _ := strings.Cut(section, "\n")
	text, _, _ = strings.Cut(text, "\n## ")
	of, _, _ := strings.Cut(heading, " ")
	if of != version[1:] && (tagged || of != unreleased) {
		return "", fmt.Errorf("CHANGELOG.md begins with %q, and not with %s", heading, version[1:])
	}
	return strings.TrimSpace(text) + "\n", nil
}
