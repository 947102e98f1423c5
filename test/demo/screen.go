package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// screen prints the story in less than 100 columns.
type screen struct {
	out   io.Writer
	color bool
	start time.Time // of the story
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

func (s *screen) paint(style, text string) string {
	if !s.color {
		return text
	}
	return "\x1b[" + style + "m" + text + "\x1b[0m"
}

func (s *screen) line(format string, args ...any) {
	fmt.Fprintln(s.out, strings.TrimRight(fmt.Sprintf(format, args...), " "))
}

// act prints an act's title.
func (s *screen) act(title string) { s.line("\n%s", s.paint(bold, strings.ToUpper(title))) }

// step prints a step's title and the elapsed time.
func (s *screen) step(format string, args ...any) {
	s.line("\n%6.1f s  %s", time.Since(s.start).Seconds(), s.paint(bold, fmt.Sprintf(format, args...)))
}

// says prints a line that belongs to the step.
func (s *screen) says(format string, args ...any) { s.line("          "+format, args...) }

// command prints a command that the step runs.
func (s *screen) command(argv []string) {
	for i, arg := range argv {
		if strings.ContainsAny(arg, " *()") {
			argv[i] = "'" + arg + "'"
		}
	}
	s.says("%s", s.paint(dim, "$ "+strings.Join(argv, " ")))
}

// printed prints a command's output.
func (s *screen) printed(text string) {
	for line := range strings.Lines(text) {
		s.says("%s", strings.TrimRight(line, "\n"))
	}
}

// table prints a step's outcome.
func (s *screen) table(rows []row) {
	s.says("%s", s.paint(dim, fmt.Sprintf("%-12s  %-18s    %-18s  %-9s  %s", "pod", "before", "after", "", "client")))
	for _, r := range rows {
		s.says("%-12s  %-18s -> %-18s  %s  %s", r.pod, r.before, r.after,
			s.paint(verdictStyle(!r.kept()), fmt.Sprintf("%-9s", r.verdict())), r.heard())
	}
}

// summary prints the outcome of the acts.
func (s *screen) summary(of outcomes) {
	s.line("")
	for _, t := range []struct {
		act string
		tally
	}{{"without stayput", of.without}, {"with stayput", of.with}} {
		s.line("%-16s %s", t.act, s.paint(verdictStyle(t.lost()), t.String()))
	}
	s.line("%-16s %s", "with a pool", s.paint(verdictStyle(of.pool.ips > 0), of.pool.ofPool()))
	s.line("%-16s %.0f s", "total time", time.Since(s.start).Seconds())
}

func verdictStyle(lost bool) string {
	if lost {
		return red
	}
	return green
}
