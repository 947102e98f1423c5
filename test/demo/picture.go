package main

import (
	"fmt"
	"html"
	"strings"
	"time"
)

const (
	lineHeight  = 18
	columnWidth = 7.9
	margin      = 14
	window      = 30 // lines
	// longestPause shortens the pauses in which pods start. The elapsed time is in the lines.
	longestPause = 2500 * time.Millisecond
	// lastPause is how long the end is shown.
	lastPause = 10 * time.Second
)

// picture returns an SVG that shows the lines as a terminal did: each appears below the others, and pushes them up. A
// viewer that shows no movement shows the end.
func picture(lines []shown) []byte {
	var text, frames strings.Builder
	var now time.Duration
	var starts []time.Duration
	for i, l := range lines {
		if i > 0 {
			now += min(l.at.Sub(lines[i-1].at), longestPause)
		}
		starts = append(starts, now)
		fmt.Fprintf(&text, `<text y="%d">%s</text>`+"\n", i*lineHeight, spans(l.text))
	}
	total := now + lastPause
	up := func(i int) int { return (window - 1 - i) * lineHeight }
	for i, start := range starts {
		// Of lines that appeared together, only the last frame would be seen.
		if i+1 < len(starts) && starts[i+1]-start < time.Second/50 {
			continue
		}
		at := float64(start) / float64(total) * 100
		if frames.Len() == 0 {
			at = 0
		}
		fmt.Fprintf(&frames, "%.3f%% {transform: translateY(%dpx)}\n", at, up(i))
	}
	width, height := columns*columnWidth, window*lineHeight
	return fmt.Appendf(nil, `<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" width="%[1]g" height="%[2]d"
  font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="13">
<style>
text {fill: #c9d1d9; white-space: pre}
.b {fill: #ffffff; font-weight: bold} .d {fill: #8b949e} .r {fill: #ff7b72} .g {fill: #7ee787}
#story {animation: story %[3].1fs step-end infinite}
@keyframes story {
%[4]s}
@media (prefers-reduced-motion: reduce) {#story {animation: none}}
</style>
<rect width="100%%" height="100%%" rx="6" fill="#0d1117"/>
<svg x="%[5]d" y="%[5]d" width="%[6]g" height="%[7]d">
<g id="story" transform="translate(0 %[8]d)">
<g transform="translate(0 13)">
%[9]s</g>
</g>
</svg>
</svg>
`, width+2*margin, height+2*margin, total.Seconds(), frames.String(), margin, width, height, up(len(lines)-1),
		text.String())
}

// spans returns a line for an SVG.
func spans(line string) string {
	classes := map[string]string{bold: "b", dim: "d", red: "r", green: "g"}
	var b strings.Builder
	end := ""
	for line != "" {
		at := painted.FindStringSubmatchIndex(line)
		if at == nil {
			break
		}
		b.WriteString(html.EscapeString(line[:at[0]]) + end)
		end = ""
		if class := classes[line[at[2]:at[3]]]; class != "" {
			b.WriteString(`<tspan class="` + class + `">`)
			end = "</tspan>"
		}
		line = line[at[1]:]
	}
	return b.String() + html.EscapeString(line) + end
}
