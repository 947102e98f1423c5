package cli

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

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

// printable returns text as a terminal may have it: what moves the cursor, sets colours, turns the direction of writing
// or cannot be seen is written as in Go's string literals. Everything that others have written goes through it on its
// way into text, the names and words of tenants and what nodes answer; JSON and YAML have ways of their own.
func printable(s string) string {
	var b strings.Builder
	for rest := s; rest != ""; {
		r, n := utf8.DecodeRuneInString(rest)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, rest[0])
		case strconv.IsPrint(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRune(r)
			b.WriteString(q[1 : len(q)-1])
		}
		rest = rest[n:]
	}
	return b.String()
}

// printableError is an error whose text is printable but for line breaks, which joined errors have.
type printableError struct{ error }

func (e printableError) Unwrap() error { return e.error }

func (e printableError) Error() string {
	lines := strings.Split(e.error.Error(), "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	return strings.Join(lines, "\n")
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
	line := printable(fmt.Sprintf(format, args...))
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

// wrapped breaks text between words so that no line is longer than most, and indents every line but the first. The
// words are [printable].
func wrapped(text, indent string, most int) string {
	var b strings.Builder
	at := 0
	for i, word := range strings.Fields(text) {
		word = printable(word)
		n := utf8.RuneCountInString(word)
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
