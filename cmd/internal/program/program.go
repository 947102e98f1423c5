// Package program is what the programs share: their root command, signals, version, flags and API server.
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

// Run executes a command, whose context SIGINT and SIGTERM end, and returns the exit code.
func Run(cmd *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := cmd.ExecuteContext(ctx); err != nil {
		return 1
	}
	return 0
}

// Daemon returns the root command of a program that serves until its context is done.
func Daemon(name, short string, serve func(ctx context.Context, stderr io.Writer) error) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Version: Version(), Args: cobra.NoArgs, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), cmd.ErrOrStderr()) },
	}
}

// Version returns the version of the program.
func Version() string { return release.Version() }

// Log is how a program logs.
type Log struct {
	level  slog.Level
	format string
}

// AddFlags adds --log-level and --log-format.
func (l *Log) AddFlags(f *pflag.FlagSet) {
	f.TextVar(&l.level, "log-level", slog.LevelInfo, "minimum level to log: debug, info, warn or error")
	f.StringVar(&l.format, "log-format", "text", "log format on standard error: text or json")
}

// Handler returns the handler that the flags ask for. An error names the flag.
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
