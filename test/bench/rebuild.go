package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/bench/internal/table"
)

// earlier is the clock of a boot before this one.
type earlier struct {
	ledger.SystemClock
	boot string
}

func (c earlier) Now() (ledger.Instant, error) {
	now, err := c.SystemClock.Now()
	now.BootID = c.boot
	return now, err
}

// measureRebuild times the first command of a node that has many addresses: kubelet's other pods wait for the lock as
// long as it runs, and 60 s at most.
func measureRebuild(ctx context.Context, b *bench) ([]table.Row, error) {
	netns, done, err := newNetNS()
	if err != nil {
		return nil, err
	}
	defer done()
	var rows []table.Row
	for _, n := range []int{10_000, 100_000} {
		for _, first := range []struct {
			what string
			fill func(w *network, n int) error
		}{{"first ADD after host-local", (*network).bind}, {"first ADD of a boot, retained", (*network).retain}} {
			var times []time.Duration
			for range b.times(3) {
				took, err := b.firstAdd(ctx, netns, func(w *network) error { return first.fill(w, n) })
				if err != nil {
					return nil, err
				}
				times = append(times, took)
			}
			rows = append(rows, table.Row{
				What: fmt.Sprintf("%s, %d addresses", first.what, n), Against: "-", Goal: table.AtMost(float64(n) / 20_000),
				Figure: table.Figure{Value: median(times).Seconds(), Unit: " s", N: len(times)},
			})
		}
	}
	return rows, nil
}

// firstAdd times the ADD that finds a network as fill left it.
func (b *bench) firstAdd(ctx context.Context, netns string, fill func(*network) error) (took time.Duration, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	w, err := b.network(b.product.Plugin, netns, ordinary)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(w.dir)) }()
	if err := fill(w); err != nil {
		return 0, err
	}
	if err := settle(ctx, w.dir); err != nil {
		return 0, err
	}
	return w.call("ADD", newID(), "first")
}

// settle waits until the disk of a directory has everything and is at rest: a node's addresses have long been on its
// disk, and it is not still discarding the many files of the round before.
func settle(ctx context.Context, dir string) error {
	unix.Sync()
	var is unix.Stat_t
	if err := unix.Stat(dir, &is); err != nil {
		return fmt.Errorf("looking at %s: %w", dir, err)
	}
	// Its counters change whenever a request ends: Documentation/block/stat.rst.
	counters := fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(is.Dev), unix.Minor(is.Dev))
	for was := ""; ; {
		now, err := os.ReadFile(counters)
		if errors.Is(err, os.ErrNotExist) || err == nil && string(now) == was {
			return nil // it is no disk, or rests
		} else if err != nil {
			return err
		}
		was = string(now)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Second):
		}
	}
}

// retain fills the network with n addresses that were retained in an earlier boot.
func (w *network) retain(n int) error {
	r, err := ledger.NewRange(networkRange, netip.Addr{}, netip.Addr{}, netip.Addr{})
	if err != nil {
		return err
	}
	const boot = "before"
	l := ledger.New(&ledger.Network{
		Name: networkName, DataDir: filepath.Join(w.dir, "data"), Ranges: []ledger.RangeSet{{r}},
	}, ledger.Options{StateDir: filepath.Join(w.dir, "state"), Clock: earlier{boot: boot}})
	if err := l.Prepare(); err != nil {
		return err
	}
	claims, err := filepath.Glob(filepath.Join(w.dir, "state", networkName+"-*", "claims"))
	if err != nil || len(claims) != 1 {
		return fmt.Errorf("the directories of claims are %v: %w", claims, err)
	}
	addr, now := firstAddr, time.Now().UTC().Format(time.RFC3339)
	for i := range n {
		addr = addr.Next()
		pod := fmt.Sprintf("web-%d", i)
		claim := fmt.Sprintf(`{"v":1,"key":{"network":%q,"identity":"pod:default/%s","pod":%q,"ifname":"eth0"},`+
			`"addrs":[%q],"policy":{"retention":"720h0m0s","whenScaled":"Retain","whenDeleted":"Retain"}`,
			networkName, pod, pod, addr)
		clock := fmt.Sprintf(`{"left":"720h0m0s","wall":%q,"boottime":1,"boot":%q}`, now, boot)
		record := fmt.Sprintf(`%s,"since":%q,"run":%s,"at":%s}`, claim, now, clock, clock)
		name := sha256.Sum256([]byte(strings.Join([]string{networkName, "pod:default/" + pod, pod, "eth0"}, "\x00")))
		if err := errors.Join(
			os.WriteFile(filepath.Join(w.dir, "data", networkName, addr.String()), []byte(record), 0o600),
			os.WriteFile(filepath.Join(claims[0], hex.EncodeToString(name[:])), []byte(claim+"}\n"), 0o600),
		); err != nil {
			return err
		}
	}
	return nil
}
