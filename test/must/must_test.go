package must_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stayput/stayput/test/must"
)

// spy is a test that records how it ended.
type spy struct {
	testing.TB
	fatal string
}

func (*spy) Helper() {}

func (s *spy) Fatal(args ...any) {
	s.fatal = fmt.Sprint(args...)
	runtime.Goexit()
}

func (s *spy) Fatalf(format string, args ...any) { s.Fatal(fmt.Sprintf(format, args...)) }

// end returns the message with which body ended its test: "" if it did not.
func end(t *testing.T, body func(testing.TB)) string {
	s := &spy{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		body(s)
	}()
	<-done
	return s.fatal
}

func TestAnErrorEndsTheTest(t *testing.T) {
	if got := end(t, func(t testing.TB) { must.Do(t, errors.New("no")) }); got != "no" {
		t.Errorf("an error: %q", got)
	}
	if got := end(t, func(t testing.TB) { must.Do(t, nil) }); got != "" {
		t.Errorf("no error: %q", got)
	}
}

func TestAConditionThatNeverHoldsEndsTheTest(t *testing.T) {
	never := func() bool { return false }
	got := end(t, func(t testing.TB) { must.Within(t, time.Millisecond, "nothing", never) })
	if got != "timed out after 1ms waiting for nothing" {
		t.Errorf("never: %q", got)
	}
	calls := 0
	third := func() bool { calls++; return calls == 3 }
	if got := end(t, func(t testing.TB) { must.Eventually(t, "the third call", third) }); got != "" || calls != 3 {
		t.Errorf("at the third call: %q after %d", got, calls)
	}
}
