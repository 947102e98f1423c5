package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/stayput/stayput/test/must"
)

func TestTheSameProgramsMakeTheSameImage(t *testing.T) {
	of := func(content string, at int64) v1.Hash {
		dir := t.TempDir()
		for _, program := range Programs {
			must.Do(t, os.WriteFile(filepath.Join(dir, program), []byte(content+program), 0o700))
		}
		img, err := New(dir, "arm64", "v1.2.3", time.Unix(at, 0))
		must.Do(t, err)
		digest, err := WriteLayout(filepath.Join(t.TempDir(), "image"), "v1.2.3", map[string]v1.Image{"arm64": img})
		must.Do(t, err)
		return digest
	}
	first := of("a", 1)
	if again := of("a", 1); again != first {
		t.Errorf("%s, and then %s", first, again)
	}
	if other := of("b", 1); other == first {
		t.Error("other programs make the same image")
	}
}

func TestTheDockerfileMakesAnImageOfTheSame(t *testing.T) {
	b, err := os.ReadFile("../../../Dockerfile")
	must.Do(t, err)
	says := string(b)
	for label, value := range labels("${VERSION}") {
		if !strings.Contains(says, label+`="`+value+`"`) {
			t.Errorf("it lacks the label %s=%q", label, value)
		}
	}
	if want := "\nCOPY bin/" + strings.Join(Programs, " bin/") + " /\n"; !strings.Contains(says, want) {
		t.Errorf("it lacks %q", want)
	}
}
