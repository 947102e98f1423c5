package program

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
)

const (
	// memoryMax has the limit of the container's control group in bytes, or "max".
	memoryMax = "/sys/fs/cgroup/memory.max"
	// memoryShare of it is for the Go runtime, in percent; the rest is for what it does not count.
	memoryShare = 90
)

// LimitMemory sets the runtime's soft memory limit, in bytes, and how much garbage may pile up, in percent of the heap.
// Go's default is 100. $GOMEMLIMIT and $GOGC take precedence. A limit of 0 sets none.
func LimitMemory(limit int64, garbage int) {
	if limit > 0 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(limit)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbage)
	}
}

// LimitProcessors has the program run on n processors at a time. $GOMAXPROCS takes precedence.
func LimitProcessors(n int) {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(n)
	}
}

// SpareCollections lets at least as many bytes of garbage pile up as given, and percent of a larger heap. A percentage
// alone has a small heap collected at every few requests. $GOGC takes precedence.
func SpareCollections(least uint64, percent int) {
	if os.Getenv("GOGC") != "" {
		return
	}
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	if heap := live[0].Value.Uint64(); heap > 0 { // 0: before the first collection
		debug.SetGCPercent(garbageOf(heap, least, percent))
	}
	// What nothing refers to is cleaned up at the next collection, which is when the heap is known again.
	runtime.AddCleanup(new([64]byte), func(struct{}) { SpareCollections(least, percent) }, struct{}{})
}

// garbageOf returns how much garbage may pile up beside a heap of that many bytes, in percent of it.
func garbageOf(heap, least uint64, percent int) int { return max(percent, int(least*100/heap)) }

// ContainerMemory returns the limit at which the runtime collects garbage in time for the memory limit of the
// container: below it a program is slower, above it the kernel kills it. It returns 0 if there is none.
func ContainerMemory() int64 { return containerMemory(memoryMax) }

func containerMemory(file string) int64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0 // not in a container
	}
	limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0
	}
	return limit / 100 * memoryShare
}
