package spool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How long commands take is counted in one file of fixed size, <stateDir>/latency, which every process of the plugin
// maps and adds to:
//
//	word 0                 latencyMagic: what it is, its version, and the order of bytes in a word
//	then for each Ending   the sum of the durations in nanoseconds, the count of each bucket of LatencyBuckets,
//	                       and the count of those above the last
//
// A word is a uint64 of the machine's order of bytes. The agent makes the file; without it the plugin counts nothing.
// Nothing is synced and nothing depends on it: a reader may see one word of a command without the other, a power loss
// takes what was counted last, and a file that is missing, too short, or another program's costs only the figures.
const (
	latencyName  = "latency"
	tmpSuffix    = ".tmp"
	latencyMagic = 0x01_74_75_70_79_61_74_73 // "stayput" and the version
	wordSize     = 8
	seriesWords  = 1 + len(latencyBuckets) + 1
	latencyWords = 1 + int(lastEnding)*seriesWords
	latencySize  = latencyWords * wordSize
)

var latencyBuckets = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, time.Minute,
}

// Ending is a command and how it ended; zero is none. The file is ordered by it: a new one is a new version.
type Ending int

const (
	AddOrdinary Ending = iota + 1 // fresh addresses, nothing promised
	AddPromised                   // fresh addresses, promised from now on
	AddRestored
	AddInUse // the predecessor had the addresses: the runtime tries again
	AddFailed
	DelRetained
	DelFreed // or there was nothing to free
	DelFailed
	lastEnding = DelFailed
)

// Words returns the command and its result, as the metric names them.
func (e Ending) Words() (command, result string) {
	w := [lastEnding][2]string{
		{"add", "ordinary"}, {"add", "promised"}, {"add", "restored"}, {"add", "in_use"}, {"add", "error"},
		{"del", "retained"}, {"del", "freed"}, {"del", "error"},
	}[e-1]
	return w[0], w[1]
}

// ErrNotLatencies says that the file is not one of this version.
var ErrNotLatencies = errors.New("no latency file")

// LatencyFile returns the path of the file that commands are counted in.
func (d Dir) LatencyFile() string { return d.path(latencyName) }

// Observe counts a command. It is for the plugin, when everything else is done: five system calls, no lock and no wait.
// Without a file it does nothing. Errors: ErrNotLatencies, or the disk's.
func (d Dir) Observe(e Ending, took time.Duration) error {
	path := d.LatencyFile()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "fstat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != int64(latencySize) {
		return fmt.Errorf("%w: %s", ErrNotLatencies, path)
	}
	mapped, err := unix.Mmap(fd, 0, latencySize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return &fs.PathError{Op: "mmap", Path: path, Err: err}
	}
	err = count(mapped, e, took)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, path)
	}
	return errors.Join(err, unix.Munmap(mapped))
}

// count adds to a mapped file. Touching a page of it is a read or a write of the disk, and truncating the file takes
// the page away: the signal that the kernel sends for either must not end a command that has succeeded.
func count(mapped []byte, e Ending, took time.Duration) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			if _, fault := r.(interface{ Addr() uintptr }); !fault {
				panic(r)
			}
			err = unix.EIO
		}
	}()
	words := unsafe.Slice((*uint64)(unsafe.Pointer(&mapped[0])), latencyWords) // a mapping begins with a page
	if atomic.LoadUint64(&words[0]) != latencyMagic {
		return ErrNotLatencies
	}
	series := words[1+int(e-1)*seriesWords:][:seriesWords]
	bucket := 0
	for bucket < len(latencyBuckets) && took > latencyBuckets[bucket] {
		bucket++
	}
	atomic.AddUint64(&series[0], uint64(max(took, 0)))
	atomic.AddUint64(&series[1+bucket], 1)
	return nil
}

// Latency is how long the commands took that ended in one way.
type Latency struct {
	Ending Ending
	Sum    time.Duration
	// Buckets has, for each of LatencyBuckets, how many commands took at most that long; Count are all.
	Buckets []uint64
	Count   uint64
}

// LatencyBuckets returns the upper bounds of a Latency's buckets.
func LatencyBuckets() []time.Duration { return latencyBuckets[:] }

// Latencies returns what was counted, an element for every Ending in their order. Errors: fs.ErrNotExist before
// MakeLatencies, ErrNotLatencies, or the disk's.
func (d Dir) Latencies() ([]Latency, error) {
	path := d.LatencyFile()
	b, err := local.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(b) != latencySize || binary.NativeEndian.Uint64(b) != latencyMagic {
		return nil, fmt.Errorf("%w: %s", ErrNotLatencies, path)
	}
	b = b[wordSize:]
	word := func() uint64 {
		w := binary.NativeEndian.Uint64(b)
		b = b[wordSize:]
		return w
	}
	all := make([]Latency, lastEnding)
	for i := range all {
		l := Latency{Ending: Ending(i + 1), Sum: time.Duration(word()), Buckets: make([]uint64, len(latencyBuckets))}
		for j := range l.Buckets {
			l.Count += word()
			l.Buckets[j] = l.Count
		}
		l.Count += word()
		all[i] = l
	}
	return all, nil
}

// MakeLatencies makes the file unless there is one of this version; anything else in its place but a directory is
// replaced. It is for the agent alone. The errors are the disk's.
func (d Dir) MakeLatencies() error {
	_, err := d.Latencies()
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, ErrNotLatencies) && !errors.Is(err, unix.ELOOP):
		return err
	}
	path := d.LatencyFile()
	data := make([]byte, latencySize)
	binary.NativeEndian.PutUint64(data, latencyMagic)
	// Written out, not left as a hole: a page that finds no room on the disk later would be a signal.
	if err := local.WriteFile(path+tmpSuffix, data, mode); err != nil {
		return err
	}
	return local.Rename(path+tmpSuffix, path)
}
