package main

import (
	"context"
	"errors"
	"testing"
)

func TestTheLastOfSeveralFaultsIsUndoneUntilThatSucceeds(t *testing.T) {
	b := &breaker{undos: map[string]int{}}
	calls := 0
	do := func(context.Context) error {
		if calls++; calls < 3 {
			return errors.New("no API server")
		}
		return nil
	}
	first, second := b.undo("uncordon a", do), b.undo("uncordon a", do)
	other := b.undo("uncordon b", func(context.Context) error { return nil })
	for _, heal := range []func(context.Context) error{first, other} {
		if err := heal(t.Context()); err != nil || calls != 0 {
			t.Fatalf("%d calls while another fault is open, error: %v", calls, err)
		}
	}
	if err := second(t.Context()); err != nil || calls != 3 {
		t.Errorf("%d calls at the end of the last fault, want 3, error: %v", calls, err)
	}
}
