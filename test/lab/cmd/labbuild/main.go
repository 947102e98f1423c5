// Labbuild fills the lab's cache, so that the first test does not have to.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/stayput/stayput/test/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if _, err := lab.BuildCluster(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "labbuild:", err)
		os.Exit(1)
	}
}
