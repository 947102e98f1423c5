package spool

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// latencies is a directory with a file of latencies in it.
func latencies(t *testing.T) Dir {
	t.Helper()
	d := Dir(t.TempDir())
	if err := d.MakeLatencies(); err != nil {
		t.Fatal(err)
	}
	return d
}

func read(t *testing.T, d Dir, e Ending) Latency {
	t.Helper()
	all, err := d.Latencies()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(l Latency) bool { return l.Ending == e })
	return all[i]
}

func observe(t *testing.T, d Dir, e Ending, took time.Duration) {
	t.Helper()
	if err := d.Observe(e, took); err != nil {
		t.Fatal(err)
	}
}

func TestACommandIsCountedByHowItEndedInTheBucketOfItsDuration(t *testing.T) {
	d := latencies(t)
	for e := AddOrdinary; e <= lastEnding; e++ {
		for range e {
			observe(t, d, e, 2*time.Millisecond)
		}
	}
	observe(t, d, AddRestored, 2500*time.Microsecond) // a bound is in its bucket
	observe(t, d, AddRestored, time.Hour)
	observe(t, d, AddRestored, -time.Second) // a clock that was set back
	for e := AddOrdinary; e <= lastEnding; e++ {
		l := read(t, d, e)
		count, quick, sum := uint64(e), uint64(0), time.Duration(e)*2*time.Millisecond
		if e == AddRestored {
			count, quick, sum = count+3, 1, sum+2500*time.Microsecond+time.Hour
		}
		if l.Count != count || l.Sum != sum {
			t.Errorf("ending %d: %d commands of %v, want %d of %v", e, l.Count, l.Sum, count, sum)
		}
		for i, bound := range LatencyBuckets() {
			want := quick
			if bound > 2*time.Millisecond {
				want = count
				if e == AddRestored {
					want-- // the one of an hour
				}
			}
			if l.Buckets[i] != want {
				t.Errorf("ending %d: %d commands took at most %v, want %d", e, l.Buckets[i], bound, want)
			}
		}
	}
}

func TestEveryEndingHasWordsOfItsOwn(t *testing.T) {
	seen := map[[2]string]bool{}
	for e := AddOrdinary; e <= lastEnding; e++ {
		command, result := e.Words()
		if command == "" || result == "" || seen[[2]string{command, result}] {
			t.Errorf("ending %d is %q %q", e, command, result)
		}
		seen[[2]string{command, result}] = true
	}
}

func TestCommandsThatEndAtOnceAreAllCounted(t *testing.T) {
	d := latencies(t)
	const at, each = 16, 200
	var wg sync.WaitGroup
	for range at {
		wg.Go(func() {
			for range each {
				if err := d.Observe(DelFreed, time.Microsecond); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if l := read(t, d, DelFreed); l.Count != at*each || l.Sum != at*each*time.Microsecond || l.Buckets[0] != at*each {
		t.Errorf("%d commands of %v are counted, want %d", l.Count, l.Sum, at*each)
	}
}

func TestWithoutAnAgentNothingIsCountedAndNoFileIsMade(t *testing.T) {
	d := Dir(t.TempDir())
	observe(t, d, AddOrdinary, time.Millisecond)
	if names, err := os.ReadDir(string(d)); err != nil || len(names) > 0 {
		t.Errorf("there is %v, %v", names, err)
	}
	if _, err := d.Latencies(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("reading: %v", err)
	}
}

func TestWhatWasCountedOutlivesTheAgent(t *testing.T) {
	d := latencies(t)
	observe(t, d, DelRetained, time.Millisecond)
	if err := d.MakeLatencies(); err != nil {
		t.Fatal(err)
	}
	if l := read(t, d, DelRetained); l.Count != 1 {
		t.Errorf("%d commands are counted after the agent has come back, want 1", l.Count)
	}
}

func TestAFileThatIsNoneOfLatenciesIsNotTouchedAndIsReplacedByTheAgent(t *testing.T) {
	whole, err := os.ReadFile(latencies(t).LatencyFile())
	if err != nil {
		t.Fatal(err)
	}
	other := slices.Clone(whole)
	other[7]++ // the version
	for name, data := range map[string][]byte{
		"empty": nil, "cut off": whole[:len(whole)-1], "too long": append(slices.Clone(whole), 0), "another version": other,
		"garbage": bytes.Repeat([]byte{0xff}, len(whole)),
	} {
		t.Run(name, func(t *testing.T) {
			d := Dir(t.TempDir())
			if err := os.WriteFile(d.LatencyFile(), data, 0o644); err != nil {
				t.Fatal(err)
			}
			replacedUntouched(t, d)
		})
	}
	t.Run("a pipe", func(t *testing.T) {
		d := Dir(t.TempDir())
		if err := unix.Mkfifo(d.LatencyFile(), 0o644); err != nil {
			t.Fatal(err)
		}
		replacedUntouched(t, d)
	})
	t.Run("a link to a file of latencies", func(t *testing.T) {
		d := Dir(t.TempDir())
		target := latencies(t).LatencyFile()
		if err := os.Symlink(target, d.LatencyFile()); err != nil {
			t.Fatal(err)
		}
		replacedUntouched(t, d)
		if b, err := os.ReadFile(target); err != nil || !bytes.Equal(b, whole) {
			t.Errorf("its target has changed: %v", err)
		}
	})
	t.Run("a directory", func(t *testing.T) {
		d := Dir(t.TempDir())
		if err := os.Mkdir(d.LatencyFile(), 0o755); err != nil {
			t.Fatal(err)
		}
		if d.Observe(AddOrdinary, 0) == nil || d.MakeLatencies() == nil {
			t.Error("no error")
		}
	})
}

func replacedUntouched(t *testing.T, d Dir) {
	t.Helper()
	before, err := os.Lstat(d.LatencyFile())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Observe(AddOrdinary, time.Millisecond); err == nil {
		t.Error("it is counted in it")
	}
	if after, err := os.Lstat(d.LatencyFile()); err != nil || after.ModTime() != before.ModTime() ||
		after.Size() != before.Size() {
		t.Errorf("it was touched: %v, %v", after, err)
	}
	if _, err := d.Latencies(); err == nil {
		t.Error("it is believed")
	}
	if err := d.MakeLatencies(); err != nil {
		t.Fatal(err)
	}
	if l := read(t, d, AddOrdinary); l.Count != 0 {
		t.Errorf("the new one counts %d commands", l.Count)
	}
	observe(t, d, AddOrdinary, time.Millisecond)
	if l := read(t, d, AddOrdinary); l.Count != 1 {
		t.Errorf("the new one counts %d commands, want 1", l.Count)
	}
}

// The kernel answers a touch of such a page with a signal.
func TestAFileThatIsCutOffWhileItIsMappedIsAnErrorAndNotTheEndOfTheCommand(t *testing.T) {
	path := filepath.Join(t.TempDir(), latencyName)
	if err := os.WriteFile(path, make([]byte, latencySize), 0o644); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	mapped, err := unix.Mmap(fd, 0, latencySize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapped) }()
	if err := unix.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	if err := count(mapped, AddOrdinary, time.Second); !errors.Is(err, unix.EIO) {
		t.Errorf("counting says %v, want an error of the disk", err)
	}
}
