package program

import (
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/stayput/stayput/test/must"
)

func TestTheRuntimeStaysBelowTheLimitOfTheContainer(t *testing.T) {
	const garbage = 40
	limit, percent := debug.SetMemoryLimit(-1), debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetMemoryLimit(limit); debug.SetGCPercent(percent) })
	for name, c := range map[string]struct {
		file, gomemlimit, gogc string
		limit                  int64
		percent                int
	}{
		"512Mi":              {"536870912\n", "", "", 536870912 / 100 * memoryShare, garbage},
		"without a limit":    {"max\n", "", "", math.MaxInt64, garbage},
		"not in a container": {"", "", "", math.MaxInt64, garbage},
		"set by hand":        {"536870912\n", "1GiB", "80", math.MaxInt64, 100},
	} {
		t.Setenv("GOMEMLIMIT", c.gomemlimit)
		t.Setenv("GOGC", c.gogc)
		debug.SetMemoryLimit(math.MaxInt64)
		debug.SetGCPercent(100)
		file := filepath.Join(t.TempDir(), "memory.max")
		if c.file != "" {
			must.Do(t, os.WriteFile(file, []byte(c.file), 0o600))
		}
		LimitMemory(containerMemory(file), garbage)
		if is := debug.SetMemoryLimit(-1); is != c.limit {
			t.Errorf("%s: the limit is %d, want %d", name, is, c.limit)
		}
		if is := debug.SetGCPercent(100); is != c.percent {
			t.Errorf("%s: the percentage is %d, want %d", name, is, c.percent)
		}
	}
}

func TestTheProcessorsAreLimitedUnlessTheyAreSetByHand(t *testing.T) {
	was := runtime.GOMAXPROCS(2)
	t.Cleanup(func() { runtime.GOMAXPROCS(was) })
	for byHand, want := range map[string]int{"2": 2, "": 1} {
		runtime.GOMAXPROCS(2)
		t.Setenv("GOMAXPROCS", byHand)
		if LimitProcessors(1); runtime.GOMAXPROCS(0) != want {
			t.Errorf("with %q it is %d, want %d", byHand, runtime.GOMAXPROCS(0), want)
		}
	}
}

func TestASmallHeapIsNotCollectedAtEveryFewRequests(t *testing.T) {
	for heap, want := range map[uint64]int{1 << 20: 3200, 32 << 20: 100, 80 << 20: 40, 500 << 20: 40} {
		if is := garbageOf(heap, 32<<20, 40); is != want {
			t.Errorf("beside %d bytes: %d %%, want %d", heap, is, want)
		}
	}
	was := debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetGCPercent(was) })
	t.Setenv("GOGC", "")
	SpareCollections(1<<40, 40)
	for debug.SetGCPercent(100) < 1000 { // after a collection; else this test does not end
		runtime.GC()
	}
	debug.SetGCPercent(100)
	for debug.SetGCPercent(100) < 1000 { // and after each further one
		runtime.GC()
	}
}
