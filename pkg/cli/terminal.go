package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// width returns how wide text may be: as wide as the terminal, or 80 if w is not one, so that piped text is always the
// same.
func width(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil && n > 0 {
			return n
		}
	}
	return 80
}

// interactive reports whether a stream is a terminal.
func interactive(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// colour is a parameter of the escape sequence for text on a terminal.
type colour string

const (
	plain  colour = ""
	dim    colour = "2"
	green  colour = "32"
	yellow colour = "33"
	red    colour = "31"
)

// paint is whether colour is used.
type paint bool

func painting(w io.Writer) paint {
	_, refused := os.LookupEnv("NO_COLOR") // no-color.org
	return paint(interactive(w) && !refused && os.Getenv("TERM") != "dumb")
}

func (p paint) text(c colour, s string) string {
	if !p || c == plain {
		return s
	}
	return "\x1b[" + string(c) + "m" + s + "\x1b[0m"
}

// progress is a line on a terminal that says what is being done. On other streams it says nothing.
type progress struct {
	w    io.Writer
	last int
}

func newProgress(w io.Writer) *progress {
	if !interactive(w) {
		return &progress{}
	}
	return &progress{w: w}
}

func (p *progress) say(format string, args ...any) {
	if p.w == nil {
		return
	}
	line := fmt.Sprintf(format, args...)
	if most := width(p.w) - 1; len(line) > most {
		line = line[:max(0, most)]
	}
	fmt.Fprint(p.w, "\r", line, strings.Repeat(" ", max(0, p.last-len(line))))
	p.last = len(line)
}

// done removes the line.
func (p *progress) done() {
	if p.w != nil && p.last > 0 {
		fmt.Fprint(p.w, "\r", strings.Repeat(" ", p.last), "\r")
		p.last = 0
	}
}

// wrapped breaks text between words so that no line is longer than most, and indents every line but the first.
func wrapped(text, indent string, most int) string {
	var b strings.Builder
	at := 0
	for i, word := range strings.Fields(text) {
		n := len([]rune(word))
		switch {
		case i == 0:
		case at+1+n > most:
			b.WriteString("\n" + indent)
			at = len(indent)
		default:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at += n
	}
	return b.String()
}
