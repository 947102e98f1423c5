package main

import (
	"bytes"
	"errors"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/must"
)

// asProgram has the test binary be the program.
const asProgram = "STAYPUT_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

func TestAnAPIServerThatRefusesConnectionsIsOneLine(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	must.Do(t, l.Close())
	for _, verb := range []string{"get", "why web-0", "release web-0 --yes", "release --node node-1 --yes", "node node-1",
		"check", "check --preflight", "import openkruise --yes", "import spiderpool --pools --yes", "version"} {
		cmd := exec.Command(os.Args[0], append(strings.Fields(verb), "--server=http://"+l.Addr().String(),
			"--kubeconfig="+os.DevNull, "--cache-dir="+t.TempDir())...)
		cmd.Env = append(os.Environ(), asProgram+"=1")
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		var exit *exec.ExitError
		if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 || (out.Len() > 0) != (verb == "version") ||
			!strings.HasPrefix(errs.String(), "Error: ") || !strings.HasSuffix(errs.String(), "connection refused\n") ||
			strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%s: %v, printed %q and %q", verb, err, out.String(), errs.String())
		}
	}
}
