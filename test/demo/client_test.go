package main

import (
	"testing"
	"time"
)

func TestAPodIsAwayBetweenAnswersIfQuestionsFail(t *testing.T) {
	begin := time.Now()
	var questions []question
	ask := func(sent, ended int, answered bool) {
		at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
		questions = append(questions, question{at(sent), at(ended), answered})
	}
	ask(0, 900, false) // before the first answer
	ask(50, 950, false)
	ask(1000, 1001, true)
	ask(1050, 1950, false)
	ask(1100, 1101, false)
	ask(1150, 2050, false)
	ask(1200, 1900, true) // late, but answered
	ask(1950, 1951, true)
	ask(2000, 2900, false) // a single failure may be the machine's fault
	ask(2950, 2951, true)
	if got, want := longestAway(questions), 899*time.Millisecond; got != want {
		t.Errorf("away %v, want %v", got, want)
	}
}
