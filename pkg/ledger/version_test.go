package ledger

import (
	"bytes"
	"errors"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

// newerOf writes a record as a later version might: what the rules above recordVersion leave free has changed.
func newerOf(b []byte) []byte {
	switch {
	case bytes.HasPrefix(b, []byte("{")):
		b = bytes.Replace(b, []byte(`"v":1`), []byte(`"v":2`), 1)
		b = bytes.Replace(b, []byte(`"policy":`), []byte(`"policy":"kept until noon","was":`), 1)
		return bytes.Replace(b, []byte(`"containerID":`), []byte(`"containers":["x"],"id":`), 1)
	case bytes.HasPrefix(b, []byte("v1 ")):
		return append([]byte("v2 "), b[3:]...)
	}
	return append([]byte("v2 "), b...) // the boot marker
}

// downgrade makes some of the files of the world those of a newer version. The returned function takes that back:
// the newer version is installed again and reads what it had written.
func (w *world) downgrade(paths ...string) (upgrade func()) {
	w.t.Helper()
	old := map[string][]byte{}
	for _, path := range paths {
		b, err := w.fs.ReadFile(path)
		if err != nil {
			w.failf("%v", err)
		}
		old[path] = slices.Clone(b)
		if err := w.fs.WriteFile(path, newerOf(b), modeState); err != nil {
			w.failf("%v", err)
		}
	}
	return func() {
		w.t.Helper()
		for path, was := range old {
			b, err := w.fs.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(b, newerOf(was)) {
				w.failf("%s was touched: %q, %v", path, b, err)
			}
			if err := w.fs.WriteFile(path, was, modeState); err != nil {
				w.failf("%v", err)
			}
		}
	}
}

// refused is how every command on a newer record ends: with the file and its version.
func (w *world) refused(what string, err error, path string) {
	w.t.Helper()
	if !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "version 2") {
		w.failf("%s: %v, want ErrNewer, %s and version 2", what, err, path)
	}
}

func TestWhatANewerVersionPromisedIsNeitherGivenAwayNorLost(t *testing.T) {
	home := Pod{Namespace: "default", Name: "home"}
	for _, record := range []string{"claim", "slot", "claim and slot", "claim, its address file lost"} {
		for _, reboot := range []bool{false, true} {
			name := record
			if reboot {
				name += ", over a reboot"
			}
			t.Run(name, func(t *testing.T) {
				w := newWorld(t, testNetwork("10.0.0.0/28", ""))
				w.net.PromisedShare = 1
				att, addrs, _ := w.add("home", tenMinutes)
				delete(w.netns, w.live[att].netns.Path)
				w.del(att)
				claim := filepath.Join(w.ledger().state, claimsDir, NewKey("net", home, *tenMinutes, "eth0").hash())
				file := filepath.Join("/data/net", addrs[0].String())
				var upgrade func()
				switch record {
				case "claim":
					upgrade = w.downgrade(claim)
				case "slot":
					upgrade = w.downgrade(file)
				case "claim and slot":
					upgrade = w.downgrade(claim, file)
				default:
					upgrade = w.downgrade(claim)
					must.Do(t, w.fs.Remove(file))
					must.Do(t, w.fs.Remove("/data/net/"+markerName))
				}
				if reboot {
					w.boot(time.Minute)
				} else {
					w.advance(11 * time.Minute) // what it says of its end is not known
				}
				_, _, err := w.ledger().Expire()
				must.Do(t, err)
				for range 2 {
					_, err := w.ledger().Add(AddRequest{Attachment: w.newContainer(), Pod: home, Netns: w.newNetns(),
						Policy: tenMinutes})
					want := claim
					if record == "slot" {
						want = file
					}
					w.refused("ADD of its pod", err, want)
				}
				// The others go on, and no pod gets the address however full it becomes.
				for i := 0; ; i++ {
					_, got, err := w.add("other", ordinary)
					if errors.Is(err, ErrFull) {
						break
					}
					if slices.Contains(got, addrs[0]) {
						w.failf("%v was given to another pod", addrs)
					}
				}
				list, err := w.ledger().List()
				must.Do(t, err)
				i := slices.IndexFunc(list, func(ad Address) bool { return ad.Addr == addrs[0] })
				if i < 0 || list[i].State != StateNewer || !errors.Is(list[i].Newer, ErrNewer) {
					w.failf("%s is listed as %+v", addrs[0], list)
				}
				if err := w.ledger().Drop(addrs[0]); err != nil {
					w.refused("dropping", err, claim)
				}
				if record == "claim, its address file lost" {
					// What stands for it says nothing; its rebuild by the newer version is as for any damaged file.
					b, err := w.fs.ReadFile(file)
					must.Do(t, err)
					if string(b) != string(saysNothing) {
						w.failf("%s says %q", file, b)
					}
					return
				}
				upgrade()
				for _, a := range w.attachments() {
					w.del(a)
				}
				_, got, err := w.add("home", tenMinutes)
				if err != nil || !slices.Equal(got, addrs) {
					w.failf("after the upgrade it has %v, %v, want %v", got, err, addrs)
				}
			})
		}
	}
}

func TestTheDELOfAPodThatANewerVersionDecidedOnChangesNothing(t *testing.T) {
	pod := Pod{Namespace: "default", Name: "web-0"}
	for _, record := range []string{"claim", "index"} {
		t.Run(record, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.0.0.0/28", ""))
			att, addrs, _ := w.add("web-0", tenMinutes)
			l := w.ledger()
			path := map[string]string{
				"claim": filepath.Join(l.state, claimsDir, NewKey("net", pod, *tenMinutes, "eth0").hash()),
				"index": filepath.Join(l.state, indexDir, att.hash()),
			}[record]
			upgrade := w.downgrade(path)
			delete(w.netns, w.live[att].netns.Path)
			for range 2 {
				_, err := l.Del(DelRequest{Attachment: att})
				w.refused("DEL", err, path)
			}
			_, err := l.Reclaim(att)
			w.refused("reclaiming", err, path)
			b, err := w.fs.ReadFile(filepath.Join("/data/net", addrs[0].String()))
			if err != nil || !bytes.Equal(b, encodeBound(att)) {
				w.failf("the address file says %q, %v", b, err)
			}
			// A scan, and the rebuild of the next boot, leave it as it is.
			must.Do(t, w.fs.WriteFile("/data/net/10.0.0.9", []byte("hostlocal\r\neth0"), modeHostLocal))
			_, err = l.List()
			must.Do(t, err)
			w.boot(time.Minute)
			_, err = l.List()
			must.Do(t, err)
			upgrade()
			_, got, err := w.add("web-0", tenMinutes)
			if err != nil || !slices.Equal(got, addrs) {
				w.failf("after the upgrade it has %v, %v, want %v", got, err, addrs)
			}
		})
	}
}

func TestAMarkerOfANewerVersionHasTheWholeNetworkRefused(t *testing.T) {
	w := newWorld(t, testNetwork("10.0.0.0/28", ""))
	att, _, _ := w.add("web-0", tenMinutes)
	marker := "/data/net/" + markerName
	upgrade := w.downgrade(marker)
	before := w.fs.dump()
	for range 2 {
		_, err := w.ledger().Add(AddRequest{Attachment: w.newContainer(), Pod: Pod{Namespace: "default", Name: "job"},
			Netns: Netns{}, Policy: ordinary})
		w.refused("ADD", err, marker)
		_, err = w.ledger().Del(DelRequest{Attachment: att})
		w.refused("DEL", err, marker)
		_, err = w.ledger().List()
		w.refused("listing", err, marker)
		_, _, err = w.ledger().Expire()
		w.refused("expiring", err, marker)
	}
	if after := w.fs.dump(); after != before {
		w.failf("it was\n%s", before)
	}
	upgrade()
	w.del(att)
}

func TestADescriptionOfANewerVersionIsRefusedAndAnOlderOneRead(t *testing.T) {
	w := newWorld(t, testNetwork("10.0.0.0/28", ""))
	w.add("web-0", tenMinutes)
	o := Options{StateDir: "/state", FS: w.fs, Clock: w.clock, Netns: w.netns}
	path := filepath.Join(w.ledger().state, infoName)
	upgrade := w.downgrade(path)
	ledgers, err := Networks(o)
	w.refused("opening", err, path)
	if len(ledgers) != 0 {
		t.Errorf("opened %v", ledgers)
	}
	upgrade()
	if ledgers, err = Networks(o); err != nil || len(ledgers) != 1 ||
		ledgers[0].Network().Ranges[0].String() != w.net.Ranges[0].String() {
		t.Errorf("%v, %v", ledgers, err)
	}
}

func TestUninstallEndsWhatANewerVersionPromisedToo(t *testing.T) {
	w := newWorld(t, testNetwork("10.0.0.0/28", ""))
	att, addrs, _ := w.add("home", tenMinutes)
	delete(w.netns, w.live[att].netns.Path)
	w.del(att)
	l := w.ledger()
	w.downgrade(filepath.Join("/data/net", addrs[0].String()), filepath.Join(l.state, claimsDir,
		NewKey("net", Pod{Namespace: "default", Name: "home"}, *tenMinutes, "eth0").hash()))
	freed, err := l.Uninstall()
	must.Do(t, err)
	if !slices.Equal(freed.Addrs, addrs) || freed.InUse != nil {
		t.Errorf("%+v", freed)
	}
}

func TestUninstallIsFinishedByTheNextOneWhereverItWasKilled(t *testing.T) {
	for n := 0; ; n++ {
		w := newWorld(t, testNetwork("10.0.0.0/28", "fd00::/64"))
		w.net.PromisedShare = 1
		stopped(w, "home", tenMinutes)
		stopped(w, "set", shared)
		running, addrs, _ := w.add("running", forever)
		dead, deadAddrs, _ := w.add("dead", forever)
		delete(w.netns, w.live[dead].netns.Path) // its DEL is host-local's
		job, jobAddrs, _ := w.add("job", ordinary)
		killed := w.killAt(n, func() {
			_, err := w.ledger().Uninstall()
			must.Do(t, err)
		})

		ledgers, err := Networks(Options{StateDir: "/state", FS: w.fs, Clock: w.clock, Netns: w.netns})
		must.Do(t, err)
		for _, l := range ledgers {
			_, err := l.Uninstall()
			must.Do(t, err)
		}
		names, err := w.fs.ReadDir("/data/net")
		must.Do(t, err)
		for _, name := range names {
			if _, err := netip.ParseAddr(name); err != nil && name != lockFile && !strings.HasPrefix(name, lastPrefix) {
				w.failf("%s is left", name)
			}
		}
		for att, addrs := range map[Attachment][]netip.Addr{running: addrs, dead: deadAddrs, job: jobAddrs} {
			for _, a := range addrs {
				path := filepath.Join("/data/net", a.String())
				b, err := w.fs.ReadFile(path)
				mode, _ := w.fs.Mode(path)
				if err != nil || !bytes.Equal(b, encodeBound(att)) || mode != modeHostLocal {
					w.failf("%s is %q, %o, %v", path, b, mode, err)
				}
				names = slices.DeleteFunc(names, func(n string) bool { return n == a.String() })
			}
		}
		if len(names) != 3 { // the lock and a last_reserved_ip.N for each family
			w.failf("killed at %d: left: %v", n, names)
		}
		left, err := RemoveState(Options{StateDir: "/state", FS: w.fs})
		must.Do(t, err)
		if names, err := w.fs.ReadDir("/state"); left != 0 || !errors.Is(err, fs.ErrNotExist) {
			w.failf("killed at %d: of the state there is %v, %v", n, names, err)
		}
		if !killed {
			break
		}
	}
}

func TestUninstallFreesWhatWasPromisedToThePodsOfAnEarlierBoot(t *testing.T) {
	w := newWorld(t, testNetwork("10.0.0.0/28", ""))
	_, addrs, err := w.add("home", tenMinutes)
	must.Do(t, err)
	w.boot(time.Minute)
	freed, err := w.ledger().Uninstall()
	must.Do(t, err)
	if !slices.Equal(freed.Addrs, addrs) || freed.InUse != nil {
		t.Errorf("%+v", freed)
	}
}

func TestAPowerLossAfterAnUninstallBringsNoPromiseBack(t *testing.T) {
	for name, wiped := range map[string][]string{
		"nothing was wiped":                        nil,
		"the state was":                            {"/state"},
		"the network's state was":                  {"/state/net-*"},
		"claims and index were":                    {"/state/net-*/claims", "/state/net-*/index"},
		"the index and the network directory were": {"/state/net-*/index", "/data/net"},
		"everything was":                           {"/state", "/data/net"},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(20) {
				w := newWorld(t, testNetwork("10.0.0.0/28", "fd00::/64"))
				stopped(w, "home", forever)
				w.boot(time.Minute)
				w.prepare() // which writes the record durably
				for _, path := range wiped {
					must.Do(t, disk.RemoveAll(w.fs, strings.ReplaceAll(path, "/state/net-*", w.ledger().state)))
				}
				_, err := w.ledger().Uninstall()
				must.Do(t, err)
				w.fs.lose("mixed", rand.New(rand.NewPCG(seed, 0)))
				w.boot(time.Minute)
				if addrs, err := w.ledger().List(); err != nil || len(addrs) > 0 {
					w.failf("%+v, %v", addrs, err)
				}
			}
		})
	}
}
