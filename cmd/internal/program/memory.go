package program

import (
	"os"
	"runtime/debug"
	"strconv"
	"strings"
)

const (
	// memoryMax has the limit of the container's control group in bytes, or "max".
	memoryMax = "/sys/fs/cgroup/memory.max"
	// memoryShare of it is for the Go runtime, in percent; the rest is for what it does not count.
	memoryShare = 90
	// garbage is what may pile up beside a large heap that hardly changes, in percent of it. Go's default is 100.
	garbage = 40
)

// LimitMemory makes the runtime collect garbage in time for the memory limit of the container: below it a program is
// slower, above it the kernel kills it. $GOMEMLIMIT and $GOGC take precedence.
func LimitMemory() { limitMemory(memoryMax) }

func limitMemory(file string) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbage)
	}
	text, err := os.ReadFile(file)
	if err != nil || os.Getenv("GOMEMLIMIT") != "" {
		return // not in a container
	}
	if limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
		debug.SetMemoryLimit(limit / 100 * memoryShare)
	}
}
