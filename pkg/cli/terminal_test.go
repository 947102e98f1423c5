package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// terminal is a real one, of a width, with the end that a person would look at.
func terminal(t *testing.T, width uint16) (screen, tty *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { screen.Close() })
	fd := int(screen.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: width}); err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return screen, tty
}

func TestOnATerminalProgressIsOneLineThatGoesAway(t *testing.T) {
	screen, tty := terminal(t, 20)
	p := newProgress(tty)
	p.say("asked 1 of 3 nodes, and much more")
	p.say("asked 3")
	p.done()
	want := "\rasked 1 of 3 nodes," + "\rasked 3" + strings.Repeat(" ", 12) + "\r" + strings.Repeat(" ", 7) + "\r"
	b := make([]byte, len(want))
	if _, err := io.ReadFull(screen, b); err != nil {
		t.Fatal(err)
	}
	if got := string(b); got != want {
		t.Errorf("the screen gets %q, expected %q", got, want)
	}
}

func TestATerminalHasItsWidth(t *testing.T) {
	if _, tty := terminal(t, 123); width(tty) != 123 || !interactive(tty) {
		t.Errorf("it has width %d, and is interactive: %v", width(tty), interactive(tty))
	}
}
