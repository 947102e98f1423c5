// Package program is what the daemons have in common as programs: how they end, their version, their log flags.
package program

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stayput/stayput/cmd/internal/release"
)

// Run executes a command until it ends, or is told to by SIGINT or SIGTERM, and returns its exit code.
func Run(cmd *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := cmd.ExecuteContext(ctx); err != nil {
		return 1
	}
	return 0
}

// Version is the version of the program.
func Version() string { return release.Version() }

// Log says how a program logs.
type Log struct {
	level  slog.Level
	format string
}

// AddFlags adds --log-level and --log-format.
func (l *Log) AddFlags(f *pflag.FlagSet) {
	f.TextVar(&l.level, "log-level", slog.LevelInfo, "least level that is logged: debug, info, warn or error")
	f.StringVar(&l.format, "log-format", "text", "format of the log on standard error: text or json")
}

// Handler writes as the flags say, or is an error that names the flag.
func (l *Log) Handler(w io.Writer) (slog.Handler, error) {
	o := &slog.HandlerOptions{Level: l.level}
	switch l.format {
	case "text":
		return slog.NewTextHandler(w, o), nil
	case "json":
		return slog.NewJSONHandler(w, o), nil
	}
	return nil, fmt.Errorf("--log-format: %q is not valid: expected text or json", l.format)
}
