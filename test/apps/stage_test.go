package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/must"
)

func TestTheHeadOfAManifestHasTheCommandsThatFormTheApplication(t *testing.T) {
	for _, a := range apps {
		text, err := os.ReadFile("../../deploy/examples/" + a.manifest)
		must.Do(t, err)
		commands := commandsOf(string(text))
		if !strings.HasPrefix(commands, "kubectl ") || !strings.Contains(commands, "app="+a.name) {
			t.Errorf("%s begins with the commands %q", a.manifest, commands)
		}
		if out, err := exec.CommandContext(t.Context(), "sh", "-n", "-c", commands).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", a.manifest, err, out)
		}
	}
}
