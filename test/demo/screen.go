package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"
)

// columns is how wide the lines are at most.
const columns = 100

// screen prints the story, and keeps it for [picture].
type screen struct {
	out   io.Writer
	color bool
	start time.Time // of the story
	shown []shown
}

// shown is a line that was printed, with its colors.
type shown struct {
	at   time.Time
	text string
}

func newScreen(f *os.File) *screen {
	info, err := f.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &screen{out: f, color: terminal && os.Getenv("NO_COLOR") == ""}
}

const (
	bold  = "1"
	dim   = "2"
	red   = "31"
	green = "32"
)

func paint(style, text string) string { return "\x1b[" + style + "m" + text + "\x1b[0m" }

var painted = regexp.MustCompile("\x1b\\[([0-9]+)m")

func plain(text string) string { return painted.ReplaceAllString(text, "") }

func (s *screen) line(format string, args ...any) {
	text := strings.TrimRight(fmt.Sprintf(format, args...), " ")
	s.shown = append(s.shown, shown{time.Now(), text})
	if !s.color {
		text = plain(text)
	}
	fmt.Fprintln(s.out, text)
}

// act prints an act's title.
func (s *screen) act(title string) {
	s.line("")
	s.line("%s", paint(bold, strings.ToUpper(title)))
}

// step prints a step's title and the elapsed time.
func (s *screen) step(format string, args ...any) {
	s.line("")
	s.line("%6.1f s  %s", time.Since(s.start).Seconds(), paint(bold, fmt.Sprintf(format, args...)))
}

const indent = "          "

// says prints a line that belongs to the step.
func (s *screen) says(format string, args ...any) { s.line(indent+format, args...) }

// command prints a command that the step runs.
func (s *screen) command(argv []string) {
	text := "$"
	for _, arg := range argv {
		if strings.ContainsAny(arg, " *()") {
			arg = "'" + arg + "'"
		}
		if len(indent+text+" "+arg+` \`) > columns {
			s.says("%s", paint(dim, text+` \`))
			text = "   "
		}
		text += " " + arg
	}
	s.says("%s", paint(dim, text))
}

// printed prints a command's output.
func (s *screen) printed(text string) {
	for line := range strings.Lines(text) {
		s.says("%s", strings.TrimRight(line, "\n"))
	}
}

// table prints a step's outcome.
func (s *screen) table(rows []row) {
	s.says("%s", paint(dim, fmt.Sprintf("%-12s  %-18s    %-18s  %-9s  %s", "pod", "before", "after", "", "client")))
	for _, r := range rows {
		s.says("%-12s  %-18s -> %-18s  %s  %s", r.pod, r.before, r.after,
			paint(verdictStyle(!r.kept()), fmt.Sprintf("%-9s", r.verdict())), r.heard())
	}
}

// summary prints the outcome of the acts.
func (s *screen) summary(of outcomes) {
	s.line("")
	for _, t := range []struct {
		act string
		tally
	}{{"without stayput", of.without}, {"with stayput", of.with}} {
		s.line("%-16s %s", t.act, paint(verdictStyle(t.lost()), t.String()))
	}
	s.line("%-16s %s", "with a pool", paint(verdictStyle(of.pool.ips > 0), of.pool.ofPool()))
	s.line("%-16s %.0f s", "total time", time.Since(s.start).Seconds())
}

func verdictStyle(lost bool) string {
	if lost {
		return red
	}
	return green
}
