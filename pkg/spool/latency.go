package spool

import (
	"errors"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
)

// How long commands take is a line for each in the file <stateDir>/latency, with the command, its result and
// nanoseconds:
//
//	add restored 1234567
//
// The agent makes the file, and takes the lines; without it the plugin writes nothing. While no agent takes them, the
// first mostLatencies bytes stay. Nothing is synced and nothing depends on it: a line that is written while the agent
// takes the others may be lost, and a file that is missing or another program's costs only the figures.
const (
	latencyName   = "latency"
	tmpSuffix     = ".tmp"
	mostLatencies = 256 << 10
)

// Ending is a command and how it ended; zero is none.
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

var endingWords = [lastEnding][2]string{
	{"add", "ordinary"}, {"add", "promised"}, {"add", "restored"}, {"add", "in_use"}, {"add", "error"},
	{"del", "retained"}, {"del", "freed"}, {"del", "error"},
}

// Words returns the command and its result, as the metric and the file name them.
func (e Ending) Words() (command, result string) { return endingWords[e-1][0], endingWords[e-1][1] }

// Endings returns every Ending.
func Endings() []Ending {
	return []Ending{AddOrdinary, AddPromised, AddRestored, AddInUse, AddFailed, DelRetained, DelFreed, DelFailed}
}

// LatencyFile returns the path of the file that commands are counted in.
func (d Dir) LatencyFile() string { return d.path(latencyName) }

// Observe counts a command. It is for the plugin, when everything else is done: four system calls, no lock and no wait.
// Without a file it does nothing. The errors are the disk's.
func (d Dir) Observe(e Ending, took time.Duration) error {
	path := d.LatencyFile()
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
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
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size >= mostLatencies {
		return nil
	}
	command, result := e.Words()
	line := []byte(command + " " + result + " " + strconv.FormatInt(int64(took), 10) + "\n")
	err = disk.Retry(func() error { _, err := unix.Write(fd, line); return err })
	if err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// Latency is how a command ended, and how long it took.
type Latency struct {
	Ending Ending
	Took   time.Duration
}

// TakeLatencies returns what was counted since the last call; lines that do not parse are left out. Errors:
// fs.ErrNotExist before MakeLatencies, or the disk's.
func (d Dir) TakeLatencies() (all []Latency, err error) {
	b, err := local.ReadFile(d.LatencyFile())
	if err != nil || len(b) == 0 {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		words := strings.Fields(line)
		if len(words) != 3 {
			continue
		}
		i := slices.Index(endingWords[:], [2]string{words[0], words[1]})
		if took, err := strconv.ParseInt(words[2], 10, 64); err == nil && i >= 0 {
			all = append(all, Latency{Ending(i + 1), time.Duration(took)})
		}
	}
	return all, d.emptyLatencies()
}

// MakeLatencies makes the file unless there is one; a link in its place is replaced. It is for the agent alone. The
// errors are the disk's.
func (d Dir) MakeLatencies() error {
	_, err := local.ReadFile(d.LatencyFile())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) {
		err = d.emptyLatencies()
	}
	return err
}

func (d Dir) emptyLatencies() error {
	path := d.LatencyFile()
	return disk.Replace(local, path+tmpSuffix, path, nil, mode)
}
