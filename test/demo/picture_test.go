package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/test/must"
)

// linesOf returns the lines of a picture.
func linesOf(t *testing.T, svg []byte) (lines []string) {
	t.Helper()
	inLine := false
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return lines
		}
		must.Do(t, err)
		switch token := token.(type) {
		case xml.StartElement:
			if token.Name.Local == "text" {
				inLine = true
				lines = append(lines, "")
			}
		case xml.EndElement:
			inLine = inLine && token.Name.Local != "text"
		case xml.CharData:
			if inLine {
				lines[len(lines)-1] += string(token)
			}
		}
	}
}

func textOf(lines []shown) (all []string) {
	for _, l := range lines {
		all = append(all, plain(l.text))
	}
	return all
}

func TestThePictureShowsEachLineOnce(t *testing.T) {
	s := &screen{out: io.Discard}
	s.act("without <stayput> & more")
	s.step("%s loses power", "node-1")
	s.command([]string{"kubectl", "get", "pods", "--selector", "app in (a,b)"})
	s.says("%s then %s", paint(red, "NODE LOST"), paint(green, "kept"))
	if got, want := linesOf(t, picture(s.shown)), textOf(s.shown); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestThePictureKeepsTheOrderAndShortensPauses(t *testing.T) {
	begin := time.Now()
	second := begin.Add(time.Second)
	lines := []shown{{begin, "a"}, {second, "b"}, {second, "c"}, {begin.Add(time.Hour), "d"}}
	var at []float64
	frame := regexp.MustCompile(`(?m)^([0-9.]+)% {transform: translateY\(([0-9]+)px\)}$`)
	for _, found := range frame.FindAllSubmatch(picture(lines), -1) {
		percent, err := strconv.ParseFloat(string(found[1]), 64)
		must.Do(t, err)
		at = append(at, percent)
	}
	total := (time.Second + longestPause + lastPause).Seconds()
	if want := []float64{0, 100 / total, 100 * (1 + longestPause.Seconds()) / total}; !slices.EqualFunc(at, want,
		func(a, b float64) bool { return a-b < 0.01 && b-a < 0.01 }) {
		t.Errorf("lines appear at %v %%, want %v", at, want)
	}
}

func TestTheREADMESaysHowTheRecordedDemoEnds(t *testing.T) {
	recording, err := os.ReadFile("../../docs/images/demo.svg")
	must.Do(t, err)
	readme, err := os.ReadFile("../../README.md")
	must.Do(t, err)
	words := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	ends := 0
	for _, l := range linesOf(t, recording) {
		if strings.HasPrefix(l, "with") {
			ends++
			if !strings.Contains(words(string(readme)), words(l)) {
				t.Errorf("README.md does not say %q", words(l))
			}
		}
	}
	if ends != 3 {
		t.Errorf("the recording ends with %d outcomes", ends)
	}
}

func TestCommandsAreFoldedToTheScreen(t *testing.T) {
	s := &screen{out: io.Discard}
	argv := []string{"kubectl", "apply"}
	for range 12 {
		argv = append(argv, "-f", "deploy/install.yaml")
	}
	s.command(argv)
	for _, l := range s.shown {
		if len(plain(l.text)) > columns {
			t.Errorf("%d columns: %s", len(plain(l.text)), l.text)
		}
	}
	if len(s.shown) < 3 {
		t.Errorf("%d lines", len(s.shown))
	}
}
