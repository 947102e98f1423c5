package cli

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestANodeThatAnswersWithoutEndIsCutOff(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	a := answer{left: 4, tooLong: cancel}
	if _, err := io.Copy(&a, strings.NewReader("four")); err != nil || ctx.Err() != nil {
		t.Errorf("an answer that has the longest length: %v, %v", err, ctx.Err())
	}
	if _, err := io.Copy(&a, strings.NewReader("!")); !errors.Is(err, errLongAnswer) {
		t.Errorf("one that is longer: %v", err)
	}
	if err := context.Cause(ctx); !errors.Is(err, errLongAnswer) || a.text.String() != "four" {
		t.Errorf("ended by %v, with %q", err, a.text.String())
	}
}
