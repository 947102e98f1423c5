package placement

import (
	"context"
	"errors"
	"testing"

	"github.com/go-logr/logr/funcr"
)

func TestAnOutageIsLoggedOnceWhileTheControllerCannotStart(t *testing.T) {
	said, asked := 0, 0
	log := funcr.New(func(string, string) { said++ }, funcr.Options{})
	away := errors.New("connection refused")
	err := persist(t.Context(), log, 0, func() error {
		if asked++; asked <= 50 {
			return away
		}
		return nil
	})
	if err != nil || asked != 51 || said != 1 {
		t.Errorf("asked %d times, logged %d lines: %v", asked, said, err)
	}
	over, end := context.WithCancel(t.Context())
	end()
	if err := persist(over, log, 0, func() error { return away }); err == nil {
		t.Error("it goes on after its end")
	}
}
