package main

import "testing"

func TestNotesAreTheNewestSection(t *testing.T) {
	const log = "# Changelog\n\nIntroduction.\n\n## 0.2.0 - 2027-01-02\n\n### Added\n\n- This.\n\n## 0.1.0\n\n- That.\n"
	if text, err := notes(log, "v0.2.0", true); err != nil || text != "### Added\n\n- This.\n" {
		t.Errorf("%q, %v", text, err)
	}
	if text, err := notes(log, "v0.1.0", true); err == nil {
		t.Errorf("of an older version: %q", text)
	}
	const early = "# Changelog\n\n## Unreleased\n\n- This.\n"
	if text, err := notes(early, "v0.2.0", true); err == nil {
		t.Errorf("of a tag without a section: %q", text)
	}
	if text, err := notes(early, "v0.2.0", false); err != nil || text != "- This.\n" {
		t.Errorf("before a release: %q, %v", text, err)
	}
}
