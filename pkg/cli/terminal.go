package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// width is how wide text may be: that of the terminal, else 80, so that what is piped does not depend on where.
func width(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil && n > 0 {
			return n
		}
	}
	return 80
}

// interactive says whether people read a stream, or write it.
func interactive(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// colour is how something is drawn on a terminal.
type colour string

const (
	plain  colour = ""
	dim    colour = "2"
	green  colour = "32"
	yellow colour = "33"
	red    colour = "31"
)

// paint is a stream on which colour is used, or not.
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

// progress is one line on a terminal that says what is being done; elsewhere it says nothing.
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

// done takes the line away.
func (p *progress) done() {
	if p.w != nil && p.last > 0 {
		fmt.Fprint(p.w, "\r", strings.Repeat(" ", p.last), "\r")
		p.last = 0
	}
}

// wrapped breaks text between words, so that no line is longer than most, with indent before every line but
// the first.
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
