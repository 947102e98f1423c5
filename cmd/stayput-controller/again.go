package main

import (
	"context"
	"time"

	"github.com/go-logr/logr"

	"github.com/stayput/stayput/cmd/internal/program"
)

// againAfter keeps a controller that cannot begin, because the API server is away or refuses it, from asking
// without a pause.
const againAfter = time.Second

// startAgain replaces this process by a new one of the same, which contends for the lease anew. A controller that
// could not renew its lease in time must stop whatever it does, and a process of its own making is sure to. It
// does not end, as other controllers do: an API server that stalls for some seconds would cost a restart of the
// container, each one with a longer pause before it, up to five minutes, while pods are gated.
//
// It returns when ctx has ended, or with an error.
func startAgain(ctx context.Context, log logr.Logger, why error) error {
	log.Error(why, "Starting again", "after", againAfter)
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(againAfter):
	}
	return program.StartAgain()
}
