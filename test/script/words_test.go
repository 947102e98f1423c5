package script

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types020 "github.com/containernetworking/cni/pkg/types/020"
	types040 "github.com/containernetworking/cni/pkg/types/040"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/pkg/spool"
)

// words are the stories' commands, besides testscript's own. doc.go explains them.
var words = map[string]func(ts *testscript.TestScript, neg bool, args []string){
	"network": networkWord,
	// The runtime.
	"add": addWord, "del": delWord, "remove": removeWord, "vanish": vanishWord, "crowd": crowdWord, "fill": fillWord,
	"check": checkWord, "gc": gcWord, "status": statusWord, "version": versionWord, "plugin": pluginWord,
	"begin": beginWord, "end": endWord,
	// The node.
	"advance": advanceWord, "wallclock": wallclockWord, "reboot": rebootWord, "damage": damageWord, "disk": diskWord,
	"lock": lockWord, "unlock": unlockWord, "blocked": blockedWord, "wire": wireWord,
	// The agent.
	"policy": policyWord, "sweep": sweepWord, "uninstall": uninstallWord, "grant": grantWord, "revoke": revokeWord,
	"serves": servesWord,
	// Assertions.
	"has": hasWord, "same-address": sameAddressWord, "same-first": sameFirstWord, "address": addressWord,
	"bound": boundWord, "promises": promisesWord,
	"cnierror": cnierrorWord, "event": eventWord, "alike": alikeWord, "snapshot": snapshotWord, "unchanged": unchangedWord,
	"excuse": excuseWord, "leaks": leaksWord,
}

// Arguments.

// options splits off the KEY=VALUE arguments. The key ends at the first =.
func options(ts *testscript.TestScript, args []string, known ...string) (rest []string, opts map[string]string) {
	opts = map[string]string{}
	for _, a := range args {
		k, v, ok := strings.Cut(a, "=")
		if !ok {
			rest = append(rest, a)
			continue
		}
		if !strings.Contains(k, "/") && !slices.Contains(known, k) {
			ts.Fatalf("unknown option %s=: expected one of %q, or an annotation with a / in its key", k, known)
		}
		opts[k] = v
	}
	return rest, opts
}

func count(ts *testscript.TestScript, args []string, least, most int, usage string) {
	if len(args) < least || len(args) > most {
		ts.Fatalf("usage: %s", usage)
	}
}

func noNeg(ts *testscript.TestScript, neg bool) {
	if neg {
		ts.Fatalf("this word does not take !")
	}
}

func (s *story) networkNamed(ts *testscript.TestScript, name string) *network {
	if len(s.networks) == 0 {
		ts.Fatalf("no network: begin the story with the word network")
	}
	if name == "" {
		return s.networks[0]
	}
	for _, n := range s.networks {
		if n.name == name {
			return n
		}
	}
	ts.Fatalf("unknown network %q", name)
	return nil
}

// attachment finds or makes the attachment C[/IF][@NET].
func (s *story) attachment(ts *testscript.TestScript, name string) *attachment {
	for _, a := range s.attachments {
		if a.name == name {
			return a
		}
	}
	rest, net, _ := strings.Cut(name, "@")
	container, ifname, ok := strings.Cut(rest, "/")
	if !ok {
		ifname = "eth0"
	}
	a := &attachment{name: name, container: container, ifname: ifname, network: s.networkNamed(ts, net)}
	s.attachments = append(s.attachments, a)
	return a
}

func (s *story) known(ts *testscript.TestScript, name string) *attachment {
	for _, a := range s.attachments {
		if a.name == name {
			return a
		}
	}
	ts.Fatalf("nothing was ADDed as %q", name)
	return nil
}

// exactly returns the attachment with that name, or those matching a pattern.
func (s *story) exactly(ts *testscript.TestScript, name string) []*attachment {
	if strings.ContainsAny(name, "*[") {
		return s.matching(ts, name)
	}
	return []*attachment{s.known(ts, name)}
}

// matching returns the attachments of the containers matching a pattern, or the attachment with that name.
func (s *story) matching(ts *testscript.TestScript, pattern string) []*attachment {
	var out []*attachment
	for _, a := range s.attachments {
		if a.name == pattern {
			out = append(out, a)
		} else if ok, err := path.Match(pattern, a.container); err != nil {
			ts.Fatalf("%v", err)
		} else if ok && !strings.ContainsAny(pattern, "/@") {
			out = append(out, a)
		}
	}
	if len(out) == 0 {
		ts.Fatalf("nothing was ADDed as %q", pattern)
	}
	return out
}

// answer records the plugin's outcome and checks its form against the CNI SPEC: a failure is an error result.
func (s *story) answer(ts *testscript.TestScript, o outcome) {
	s.last = o
	fmt.Fprint(ts.Stdout(), o.stdout)
	fmt.Fprint(ts.Stderr(), o.stderr)
	if strings.Contains(o.stderr, "panic") || strings.Contains(o.stderr, "goroutine ") {
		ts.Fatalf("the plugin panicked: %s", o)
	}
	if o.code == 0 {
		return
	}
	var e types.Error
	if err := json.Unmarshal([]byte(o.stdout), &e); err != nil || e.Code == 0 || e.Msg == "" {
		ts.Fatalf("a failure without a CNI error result: %v: %s", err, o)
	}
}

// network NAME [from FILE | RANGES...] [KEY=VALUE...]
func networkWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	if len(args) < 2 {
		ts.Fatalf("usage: network NAME [from FILE | RANGES...] [KEY=VALUE...]")
	}
	n := &network{name: args[0], conf: map[string]any{}}
	ipam := map[string]any{}
	if args[1] == "from" {
		count(ts, args, 3, 3, "network NAME from FILE")
		ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[2])), &n.conf))
		args = nil
	} else {
		n.conf["ipam"] = ipam
		args = args[1:]
	}
	var sets [][]map[string]string
	for _, arg := range args {
		if k, v, ok := strings.Cut(arg, "="); ok {
			var value any
			if json.Unmarshal([]byte(v), &value) != nil {
				value = v
			}
			if k == "cniVersion" {
				n.conf[k] = v
			} else {
				ipam[k] = value
			}
			continue
		}
		var set []map[string]string
		for r := range strings.SplitSeq(arg, ",") {
			subnet, part, _ := strings.Cut(r, "@")
			m := map[string]string{"subnet": subnet}
			if start, end, ok := strings.Cut(part, "-"); ok {
				m["rangeStart"], m["rangeEnd"] = start, end
			}
			set = append(set, m)
		}
		sets = append(sets, set)
	}
	if sets != nil {
		ipam["ranges"] = sets
	}
	for _, old := range s.networks {
		if old.name == n.name {
			old.conf = n.conf
			return
		}
	}
	s.networks = append(s.networks, n)
}

var addOptions = []string{"addresses", "claims", "by", "ip", "ips", "uid", "retain", "minutes", "identity",
	"when-in-use", "annotations"}

// annotationsOf returns the pod annotations given by the options.
func annotationsOf(opts map[string]string) map[string]string {
	short := map[string]string{
		"retain": retention.AnnotationRetainIP, "minutes": retention.AnnotationReservedIPDuration,
		"identity": retention.AnnotationIdentity, "when-in-use": retention.AnnotationWhenInUse,
	}
	out := map[string]string{}
	for k, v := range opts {
		if key := short[k]; key != "" {
			out[key] = v
		} else if strings.Contains(k, "/") {
			out[k] = v
		}
	}
	return out
}

// describe sets an ADD's options on the attachment.
func (s *story) describe(ts *testscript.TestScript, a *attachment, pod string,
	opts map[string]string) (more map[string]any) {
	a.pod = ledger.Pod{}
	if a.hasPod = pod != "-"; a.hasPod {
		a.pod = ledger.Pod{Namespace: "default", Name: pod, UID: "uid-of-" + a.container}
		if ns, name, ok := strings.Cut(pod, "/"); ok {
			a.pod.Namespace, a.pod.Name = ns, name
		}
		if uid := opts["uid"]; uid != "" {
			a.pod.UID = uid
		}
	}
	a.by = opts["by"]
	if file := cmp.Or(opts["addresses"], opts["claims"]); file != "" {
		opts[netconf.AnnotationAddresses] = s.given(ts, file)
	}
	if file := opts["addresses"]; file != "" {
		s.grant(ts, a.pod.UID, file)
	}
	if a.annotations = annotationsOf(opts); opts["annotations"] == "unknown" {
		a.annotations = nil
	} else if opts["annotations"] != "" {
		ts.Fatalf("annotations=%s: expected unknown", opts["annotations"])
	}
	if ip := opts["ip"]; ip != "" {
		more = map[string]any{"args": map[string]any{"cni": map[string]any{"ips": strings.Split(ip, ",")}}}
	}
	if ips := opts["ips"]; ips != "" {
		rc := map[string]any{"ips": strings.Split(ips, ",")}
		if a.annotations != nil {
			rc["io.kubernetes.cri.pod-annotations"] = a.annotations
		}
		more = map[string]any{"runtimeConfig": rc}
	}
	return more
}

// given is a text with addresses.
func (s *story) given(ts *testscript.TestScript, file string) string {
	return strings.TrimSpace(ts.ReadFile(file))
}

// grant is the agent's grant.
func (s *story) grant(ts *testscript.TestScript, uid, file string) {
	pending, err := s.options().Grants().Begin(uid, s.given(ts, file))
	ts.Check(err)
	ts.Check(pending.Finish())
}

// serves [none] [gateway=ADDRESS] [spiderpool=on] [SUBNET...]
func servesWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	args, opts := options(ts, args, "gateway", "spiderpool")
	is := grants.Served{More: len(args) == 0, Spiderpool: opts["spiderpool"] == "on"}
	if slices.Equal(args, []string{"none"}) {
		is, args = grants.Served{None: true}, nil
	}
	for _, arg := range args {
		p, err := netip.ParsePrefix(arg)
		ts.Check(err)
		is.Subnets = append(is.Subnets, p)
	}
	if gateway := opts["gateway"]; gateway != "" {
		a, err := netip.ParseAddr(gateway)
		ts.Check(err)
		is.Gateways = append(is.Gateways, a)
	}
	ts.Check(s.options().Grants().PutServed(is))
}

// grant UID FILE
func grantWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 2, 2, "grant UID FILE")
	s.grant(ts, args[0], args[1])
}

func (s *story) setAddressVars(ts *testscript.TestScript, a *attachment) {
	name := regexp.MustCompile(`[^a-zA-Z0-9]`).ReplaceAllString(a.name, "_")
	for i, addr := range a.addrs {
		if i == 0 {
			ts.Setenv(name, addr.String())
		} else {
			ts.Setenv(fmt.Sprintf("%s_%d", name, i+1), addr.String())
		}
	}
}

// add POD C [OPTION...]
func addWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	args, opts := options(ts, args, addOptions...)
	count(ts, args, 2, 2, "add POD C[/IF][@NET] [OPTION...]")
	a := s.attachment(ts, args[1])
	more := s.describe(ts, a, args[0], opts)
	r, err := s.startAdd(a, more)
	ts.Check(err)
	s.finishAdd(ts, neg, a, r)
}

func (s *story) finishAdd(ts *testscript.TestScript, neg bool, a *attachment, r *running) {
	o := r.wait()
	s.answer(ts, o)
	if neg {
		if o.code == 0 {
			ts.Fatalf("ADD %s succeeded: %s", a.name, o.stdout)
		}
		a.owed = true // the runtime DELs after a failed ADD
		return
	}
	ts.Check(s.added(a, o))
	s.setAddressVars(ts, a)
}

// begin NAME add ...; begin NAME del C
func beginWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	if len(args) < 3 || s.background[args[0]] != nil {
		ts.Fatalf("usage: begin NAME add POD C [OPTION...] | begin NAME del C")
	}
	name := args[0]
	switch args[1] {
	case "add":
		rest, opts := options(ts, args[2:], addOptions...)
		count(ts, rest, 2, 2, "begin NAME add POD C [OPTION...]")
		a := s.attachment(ts, rest[1])
		r, err := s.startAdd(a, s.describe(ts, a, rest[0], opts))
		ts.Check(err)
		s.background[name] = r
	case "del":
		count(ts, args, 3, 3, "begin NAME del C")
		a := s.known(ts, args[2])
		r, err := s.start(programOf(a.by), a.env("DEL", s.netns(a.container)), s.stdin(a, a.by, nil))
		ts.Check(err)
		a.bound, a.owed = false, false
		s.background[name] = r
	default:
		ts.Fatalf("begin: %q cannot run in the background", args[1])
	}
}

// end NAME
func endWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	count(ts, args, 1, 1, "end NAME")
	r := s.background[args[0]]
	if r == nil {
		ts.Fatalf("nothing was begun as %q", args[0])
	}
	delete(s.background, args[0])
	if r.att != nil {
		s.finishAdd(ts, neg, r.att, r)
		return
	}
	o := r.wait()
	s.answer(ts, o)
	if neg != (o.code != 0) {
		ts.Fatalf("unexpected end: %s", o)
	}
}

// del C [times=N] [by=PLUGIN] [ranges=SUBNET] [ANNOTATION...]
func delWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	args, opts := options(ts, args, append([]string{"times", "ranges"}, addOptions...)...)
	count(ts, args, 1, 1, "del C [times=N] [by=PLUGIN] [ranges=SUBNET] [ANNOTATION...]")
	times := 1
	if t := opts["times"]; t != "" {
		var err error
		times, err = strconv.Atoi(t)
		ts.Check(err)
	}
	for _, a := range s.matching(ts, args[0]) {
		if by, ok := opts["by"]; ok {
			a.by = by
		}
		var more map[string]any
		if r := opts["ranges"]; r != "" {
			more = map[string]any{"ipam": map[string]any{"type": "stayput", "dataDir": s.data, "stateDir": s.state, "subnet": r}}
		}
		asked := *a
		maps.DeleteFunc(opts, func(k, _ string) bool { return k == "times" || k == "by" || k == "ranges" })
		if len(opts) > 0 {
			asked.annotations = annotationsOf(opts)
		}
		for range times {
			o := s.del(&asked, more)
			s.answer(ts, o)
			if neg != (o.code != 0) {
				ts.Fatalf("DEL %s: %s", a.name, o)
			}
			if o.code == 0 && o.stdout != "" {
				ts.Fatalf("DEL %s wrote a result: %s", a.name, o)
			}
		}
		a.bound, a.owed = asked.bound, asked.owed
	}
}

// remove C [at-once] [by=PLUGIN]
func removeWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	args, opts := options(ts, args, "by")
	count(ts, args, 1, 2, "remove C [at-once] [by=PLUGIN]")
	atts := s.matching(ts, args[0])
	for _, a := range atts {
		if by, ok := opts["by"]; ok {
			a.by = by
		}
	}
	if len(args) == 2 {
		if args[1] != "at-once" {
			ts.Fatalf("remove: %q is unknown: expected at-once", args[1])
		}
		var rs []*running
		for _, a := range atts {
			r, err := s.start(programOf(a.by), a.env("DEL", s.netns(a.container)), s.stdin(a, a.by, nil))
			ts.Check(err)
			a.bound, a.owed = false, false
			rs = append(rs, r)
		}
		for i, r := range rs {
			if o := r.wait(); o.code != 0 {
				ts.Fatalf("DEL %s: %s", atts[i].name, o)
			}
		}
	}
	for _, a := range atts {
		if a.owed {
			if o := s.del(a, nil); o.code != 0 {
				ts.Fatalf("DEL %s: %s", a.name, o)
			}
		}
	}
	for _, a := range atts {
		ts.Check(s.removeSandbox(a.container))
	}
	// containerd calls it again when the sandbox is removed, without a namespace.
	if len(args) == 1 {
		for _, a := range atts {
			if o := s.del(a, nil); o.code != 0 {
				ts.Fatalf("DEL %s: %s", a.name, o)
			}
		}
	}
}

// vanish C
func vanishWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 1, 1, "vanish C")
	for _, a := range s.matching(ts, args[0]) {
		ts.Check(s.removeSandbox(a.container))
	}
}

// crowd N POD C [OPTION...]
func crowdWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	args, opts := options(ts, args, addOptions...)
	count(ts, args, 3, 3, "crowd N POD C [by=both] [OPTION...]")
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	both := opts["by"] == "both"
	container, net, hasNet := strings.Cut(args[2], "@")
	if hasNet {
		net = "@" + net
	}
	var atts []*attachment
	for i := range n {
		a := s.attachment(ts, fmt.Sprintf("%s-%d%s", container, i, net))
		if both {
			opts["by"] = []string{"stayput", "host-local"}[i%2]
		}
		pod := args[1]
		if pod != "-" {
			pod = fmt.Sprintf("%s-%d", pod, i)
		}
		if s.describe(ts, a, pod, opts) != nil {
			ts.Fatalf("crowd: a crowd cannot request addresses")
		}
		// The sandboxes are made first, so that the ADDs start close together.
		_, err := s.sandbox(a.container)
		ts.Check(err)
		atts = append(atts, a)
	}
	var rs []*running
	for _, a := range atts {
		r, err := s.startAdd(a, nil)
		ts.Check(err)
		rs = append(rs, r)
	}
	var errs []error
	for _, r := range rs {
		errs = append(errs, s.added(r.att, r.wait()))
	}
	ts.Check(errors.Join(errs...))
}

// fill C [N]
func fillWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	args, opts := options(ts, args, "by", "pod")
	count(ts, args, 1, 2, "fill C [N] [by=PLUGIN]")
	most := 1 << 16
	if len(args) == 2 {
		var err error
		most, err = strconv.Atoi(args[1])
		ts.Check(err)
	}
	rest, net, hasNet := strings.Cut(args[0], "@")
	if hasNet {
		net = "@" + net
	}
	for i := range most {
		a := s.attachment(ts, fmt.Sprintf("%s-%d%s", rest, i, net))
		s.describe(ts, a, a.container, opts)
		ts.Check(s.shareSandbox(a.container))
		r, err := s.startAdd(a, nil)
		ts.Check(err)
		o := r.wait()
		if len(args) == 1 && o.code != 0 {
			s.answer(ts, o)
			var e types.Error
			if json.Unmarshal([]byte(o.stdout), &e); !strings.Contains(e.Msg, "no IP addresses available") {
				ts.Fatalf("ADD %s: the range should be full: %s", a.name, o)
			}
			s.attachments = slices.DeleteFunc(s.attachments, func(x *attachment) bool { return x == a })
			ts.Check(s.removeSandbox(a.container))
			return
		}
		ts.Check(s.added(a, o))
		s.setAddressVars(ts, a)
	}
}

// check C [prev=ADDRESS,...|none]
func checkWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	args, opts := options(ts, args, "prev", "by")
	count(ts, args, 1, 1, "check C [prev=ADDRESS,...]")
	a := s.known(ts, args[0])
	more := map[string]any{"prevResult": a.result}
	if prev := opts["prev"]; prev != "" {
		var ips []map[string]string
		for p := range strings.SplitSeq(prev, ",") {
			ips = append(ips, map[string]string{"address": p})
		}
		more["prevResult"] = map[string]any{"cniVersion": "1.1.0", "ips": ips}
	}
	by := a.by
	if v, ok := opts["by"]; ok {
		by = v
	}
	o := s.run(programOf(by), a.env("CHECK", s.netns(a.container)), s.stdin(a, by, more))
	s.answer(ts, o)
	if neg != (o.code != 0) {
		ts.Fatalf("CHECK %s: %s", a.name, o)
	}
}

// gc missing | null | keep ATTACHMENT...
func gcWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	if len(args) == 0 {
		ts.Fatalf("usage: gc [@NET] missing | null | keep ATTACHMENT...")
	}
	net := ""
	if strings.HasPrefix(args[0], "@") {
		net, args = args[0][1:], args[1:]
	}
	a := &attachment{network: s.networkNamed(ts, net)}
	more := map[string]any{}
	switch args[0] {
	case "missing":
	case "null":
		more["cni.dev/valid-attachments"] = nil
	case "keep":
		list := []map[string]string{}
		for _, name := range args[1:] {
			for _, k := range s.matching(ts, name) {
				list = append(list, map[string]string{"containerID": k.container, "ifname": k.ifname})
			}
		}
		more["cni.dev/valid-attachments"] = list
	default:
		more["cni.dev/valid-attachments"] = json.RawMessage(args[0])
	}
	o := s.run(stayput, []string{"CNI_COMMAND=GC", "CNI_PATH=" + filepath.Dir(stayput)}, s.stdin(a, "", more))
	s.answer(ts, o)
	if neg != (o.code != 0) {
		ts.Fatalf("GC: %s", o)
	}
	if _, all := more["cni.dev/valid-attachments"]; !all || neg {
		return
	}
	for _, k := range s.attachments {
		kept := len(args) > 1 &&
			slices.ContainsFunc(args[1:], func(p string) bool { return slices.Contains(s.matching(ts, p), k) })
		if k.network == a.network && !kept {
			k.bound = false
		}
	}
}

// status
func statusWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	count(ts, args, 0, 1, "status [NETWORK]")
	a := &attachment{network: s.networkNamed(ts, strings.Join(args, ""))}
	o := s.run(stayput, []string{"CNI_COMMAND=STATUS", "CNI_PATH=" + filepath.Dir(stayput)}, s.stdin(a, "", nil))
	s.answer(ts, o)
	if neg != (o.code != 0) {
		ts.Fatalf("STATUS: %s", o)
	}
}

// version [by=host-local]
func versionWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	_, opts := options(ts, args, "by")
	o := s.run(programOf(opts["by"]), []string{"CNI_COMMAND=VERSION"}, []byte(`{"cniVersion":"1.0.0"}`))
	s.answer(ts, o)
	if o.code != 0 {
		ts.Fatalf("VERSION: %s", o)
	}
}

// plugin COMMAND FILE [KEY=VALUE...]
func pluginWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	if len(args) < 2 {
		ts.Fatalf("usage: plugin COMMAND FILE [KEY=VALUE...]")
	}
	netns, err := s.sandbox("raw")
	ts.Check(err)
	env := []string{
		"CNI_COMMAND=" + args[0], "CNI_CONTAINERID=raw", "CNI_IFNAME=eth0", "CNI_NETNS=" + netns,
		"CNI_PATH=" + filepath.Dir(stayput), "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=raw",
	}
	stdin := os.Expand(ts.ReadFile(args[1]), func(k string) string {
		if k == "DATA" || k == "STATE" || k == "DIGITS300" || k == "LONG" {
			return ts.Getenv(k)
		}
		return "$" + k
	})
	o := s.run(stayput, append(env, args[2:]...), []byte(stdin))
	s.answer(ts, o)
	if neg != (o.code != 0) {
		ts.Fatalf("%s: %s", args[0], o)
	}
	if args[0] == "ADD" && !neg {
		ts.Check(s.removeSandbox("raw"))
	}
}

// advance DURATION
func advanceWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 1, 1, "advance DURATION")
	d, err := time.ParseDuration(args[0])
	ts.Check(err)
	storyOf(ts).boottime += d
}

// wallclock DURATION
func wallclockWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 1, 1, "wallclock DURATION")
	d, err := time.ParseDuration(args[0])
	ts.Check(err)
	paths, err := filepath.Glob(filepath.Join(s.data, "*", "*"))
	ts.Check(err)
	shifted := 0
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err == nil && filepath.Base(p) == ".stayput.boot" {
			ts.Check(os.WriteFile(p, shiftMarker(b, d), 0o600))
		}
		if err != nil || !bytes.HasPrefix(b, []byte("{")) {
			continue
		}
		var r map[string]any
		ts.Check(json.Unmarshal(b, &r))
		for _, k := range []string{"run", "at"} {
			m := r[k].(map[string]any)
			t, err := time.Parse(time.RFC3339Nano, m["wall"].(string))
			ts.Check(err)
			m["wall"] = t.Add(-d).Format(time.RFC3339Nano)
			m["boottime"] = json.Number(strconv.FormatFloat(m["boottime"].(float64), 'f', 0, 64))
			shifted++
		}
		b, err = json.Marshal(r)
		ts.Check(err)
		ts.Check(os.WriteFile(p, append(b, '\n'), 0o644))
	}
	if shifted == 0 {
		ts.Fatalf("nothing is retained, so no record holds the wall clock")
	}
}

// shiftMarker returns a boot marker for which the wall clock was set forward: by so much earlier are the clock's last
// reading and the network's time in its second line.
func shiftMarker(b []byte, d time.Duration) []byte {
	lines := strings.SplitN(string(b), "\n", 3)
	if f := strings.Fields(lines[min(1, len(lines)-1)]); len(f) == 4 {
		for _, i := range []int{1, 3} {
			if n, err := strconv.ParseInt(f[i], 10, 64); err == nil {
				f[i] = strconv.FormatInt(n-int64(d), 10)
			}
		}
		lines[1] = strings.Join(f, " ")
	}
	return []byte(strings.Join(lines, "\n"))
}

// reboot
func rebootWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 0, 0, "reboot")
	ts.Check(storyOf(ts).reboot())
}

// damage RECORD C HOW
func damageWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 3, 3, "damage RECORD C HOW")
	path, err := s.recordPath(args[0], s.known(ts, args[1]))
	ts.Check(err)
	ts.Check(damage(path, args[2]))
}

// disk small|full|roomy|readonly|writable DIRECTORY
func diskWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 2, 2, "disk small|full|roomy|readonly|writable DIRECTORY")
	dir := ts.MkAbs(args[1])
	ballast := filepath.Join(dir, "ballast")
	switch args[0] {
	case "small":
		ts.Check(os.MkdirAll(dir, 0o755))
		ts.Check(unix.Mount("tmpfs", dir, "tmpfs", 0, "size=512k"))
	case "full":
		f, err := os.Create(ballast)
		ts.Check(err)
		defer f.Close()
		for err == nil {
			_, err = f.Write(make([]byte, 4096))
		}
		if !errors.Is(err, unix.ENOSPC) {
			ts.Fatalf("filling %s: %v", dir, err)
		}
	case "roomy":
		ts.Check(os.Remove(ballast))
	case "readonly":
		ts.Check(unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	case "writable":
		ts.Check(unix.Mount("", dir, "", unix.MS_REMOUNT, ""))
	default:
		ts.Fatalf("disk %s is unknown", args[0])
	}
}

// lock [NETWORK]
func lockWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 0, 1, "lock [NETWORK]")
	ts.Check(s.takeLock(s.networkNamed(ts, strings.Join(args, ""))))
}

func unlockWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	storyOf(ts).unlock()
}

// blocked N
func blockedWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 1, 1, "blocked N")
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	ts.Check(storyOf(ts).blocked(ctx, n))
}

// policy C OPTION...
func policyWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	args, opts := options(ts, args, addOptions...)
	count(ts, args, 1, 1, "policy C [OPTION...]")
	a := s.known(ts, args[0])
	asked := &attachment{}
	s.describe(ts, asked, "-", opts)
	policy, _, err := retention.Parse(asked.annotations)
	ts.Check(err)
	_, err = s.partial(a.network).SetPolicy(ledger.Attachment{ContainerID: a.container, IfName: a.ifname}, a.pod, policy,
		ledger.Netns{})
	ts.Check(err)
}

// sweep
func sweepWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	out := ts.Stdout()
	ledgers, err := s.ledgers()
	ts.Check(err)
	for _, l := range ledgers {
		expired, _, err := l.Expire()
		ts.Check(err)
		for _, e := range expired {
			fmt.Fprintf(out, "%s %v\n", e.Key, e.Addrs)
		}
	}
}

// uninstall
func uninstallWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	ledgers, err := s.ledgers()
	ts.Check(err)
	for _, l := range ledgers {
		_, err := l.Uninstall()
		ts.Check(err)
	}
}

// revoke UID
func revokeWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	count(ts, args, 1, 1, "revoke UID")
	has, err := ledger.Revoke(s.options(), args[0])
	ts.Check(err)
	if neg != (len(has) > 0) {
		ts.Fatalf("pod %s has %v", args[0], has)
	}
}

// has C ADDRESS...
func hasWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	if len(args) < 2 {
		ts.Fatalf("usage: has C ADDRESS...")
	}
	a := s.known(ts, args[0])
	var got []string
	for _, x := range a.addrs {
		got = append(got, x.String())
	}
	if !slices.Equal(got, args[1:]) {
		ts.Fatalf("%s has %v, expected %v", a.name, got, args[1:])
	}
}

// same-address C1 C2, or same-address C1,C2... D1,D2... in any order
func sameAddressWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	count(ts, args, 2, 2, "same-address C1[,C2...] D1[,D2...]")
	var sides [2][]*attachment
	for i, arg := range args {
		for name := range strings.SplitSeq(arg, ",") {
			sides[i] = append(sides[i], s.exactly(ts, name)...)
		}
	}
	before, now := sides[0], sides[1]
	if len(before) != len(now) {
		ts.Fatalf("%s are %d, %s are %d", args[0], len(before), args[1], len(now))
	}
	if neg {
		for _, a := range before {
			for _, b := range now {
				if slices.ContainsFunc(b.addrs, func(x netip.Addr) bool { return slices.Contains(a.addrs, x) }) {
					ts.Fatalf("%s had %v, and %s has %v", a.name, a.addrs, b.name, b.addrs)
				}
			}
		}
		return
	}
	if strings.Contains(args[0], ",") {
		byAddr := func(a, b *attachment) int { return slices.CompareFunc(a.addrs, b.addrs, netip.Addr.Compare) }
		slices.SortFunc(before, byAddr)
		slices.SortFunc(now, byAddr)
	}
	for i, a := range before {
		if b := now[i]; len(a.addrs) == 0 || !slices.Equal(a.addrs, b.addrs) {
			ts.Fatalf("%s had %v, %s has %v", a.name, a.addrs, b.name, b.addrs)
		}
	}
}

// same-first C D
func sameFirstWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 2, 2, "same-first C D")
	c, d := s.known(ts, args[0]), s.known(ts, args[1])
	if len(c.addrs) == 0 || len(d.addrs) == 0 || c.addrs[0] != d.addrs[0] {
		ts.Fatalf("%s had %v, %s has %v", c.name, c.addrs, d.name, d.addrs)
	}
}

// address ADDRESS free | bound C[/IF] | retained POD
func addressWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	net := ""
	if len(args) > 0 && strings.HasPrefix(args[0], "@") {
		net, args = args[0][1:], args[1:]
	}
	count(ts, args, 2, 3, "address [@NET] ADDRESS free | bound C | retained POD")
	b, err := os.ReadFile(s.addressFile(s.networkNamed(ts, net), args[0]))
	is := "unreadable"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		is = "free"
	case err != nil:
		is = err.Error()
	case bytes.HasPrefix(b, []byte("{")):
		var r struct {
			Key struct{ Identity, Pod string }
		}
		if json.Unmarshal(b, &r) == nil {
			is = "retained " + r.Key.Pod
		}
	case bytes.Contains(b, []byte("\r\n")):
		container, ifname, _ := strings.Cut(string(b), "\r\n")
		if is = "bound " + container; ifname != "eth0" {
			is += "/" + ifname
		}
	}
	if want := strings.Join(args[1:], " "); is != want {
		ts.Fatalf("%s is %s, expected %s: %q", args[0], is, want, b)
	}
}

// bound N
func boundWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 1, 1, "bound N")
	got := storyOf(ts).filesWith(func(b []byte) bool { return !bytes.HasPrefix(b, []byte("{")) })
	if strconv.Itoa(len(got)) != args[0] {
		ts.Fatalf("%d addresses are bound, expected %s: %q", len(got), args[0], got)
	}
}

// promises N
func promisesWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 1, 1, "promises N")
	got, err := filepath.Glob(filepath.Join(s.state, "*", "claims", "*"))
	ts.Check(err)
	if strconv.Itoa(len(got)) != args[0] {
		ts.Fatalf("%d claims, expected %s: %q", len(got), args[0], got)
	}
}

// cnierror CODE REGEXP
func cnierrorWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 2, 2, "cnierror CODE REGEXP")
	o := storyOf(ts).last
	var e types.Error
	if o.code == 0 || json.Unmarshal([]byte(o.stdout), &e) != nil {
		ts.Fatalf("no CNI error: %s", o)
	}
	re, err := regexp.Compile(args[1])
	ts.Check(err)
	if strconv.Itoa(int(e.Code)) != args[0] || !re.MatchString(e.Msg+"; "+e.Details) {
		ts.Fatalf("code %d: %s; %s: expected code %s and %q", e.Code, e.Msg, e.Details, args[0], args[1])
	}
	if len(o.stdout) > 2048 {
		ts.Fatalf("an error of %d bytes", len(o.stdout))
	}
}

// event REASON POD [REGEXP]
func eventWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	count(ts, args, 2, 3, "event REASON POD [REGEXP]")
	events, _, err := spool.Dir(s.state).Take()
	ts.Check(err)
	s.events = append(s.events, events...)
	re := regexp.MustCompile("")
	if len(args) == 3 {
		re, err = regexp.Compile(args[2])
		ts.Check(err)
	}
	i := slices.IndexFunc(s.events, func(e ledger.Event) bool {
		return string(e.Reason) == args[0] && e.Pod.Name == args[1] && re.MatchString(e.Message)
	})
	if neg != (i < 0) {
		ts.Fatalf("the events are %+v", s.events)
	}
	if i >= 0 {
		s.events = slices.Delete(s.events, i, i+1)
	}
}

func snapshotWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	var err error
	s.seen, err = s.listing()
	ts.Check(err)
}

func unchangedWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	now, err := s.listing()
	ts.Check(err)
	if neg == (now == s.seen) {
		ts.Fatalf("before:\n%s\nnow:\n%s", s.seen, now)
	}
}

// wire C/IF ADDRESS...
func wireWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	s := storyOf(ts)
	count(ts, args, 1, 9, "wire C/IF ADDRESS...")
	container, ifname, _ := strings.Cut(args[0], "/")
	pod, err := s.sandbox(container)
	ts.Check(err)
	machine := s.netns(container + ".machine")
	if _, err := os.Stat(machine); errors.Is(err, fs.ErrNotExist) {
		machine, err = s.sandbox(container + ".machine")
		ts.Check(err)
		ns, err := os.Open(pod)
		ts.Check(err)
		defer ns.Close()
		ts.Check(inNetns(machine, func() error {
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "port"}, PeerName: ifname,
				PeerNamespace: netlink.NsFd(ns.Fd())})
		}))
		ts.Check(inNetns(pod, func() error { return setUp(ifname) }))
	}
	ts.Check(inNetns(machine, func() error {
		if err := setUp("port"); err != nil {
			return err
		}
		port, err := netlink.LinkByName("port")
		if err != nil {
			return err
		}
		had, err := netlink.AddrList(port, netlink.FAMILY_ALL)
		for _, a := range had {
			err = errors.Join(err, netlink.AddrDel(port, &a))
		}
		for _, text := range args[1:] {
			a, parseErr := netip.ParseAddr(text)
			err = errors.Join(err, parseErr, netlink.AddrAdd(port,
				&netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice()), Flags: unix.IFA_F_NODAD}))
		}
		for err == nil && port.Attrs().OperState != netlink.OperUp { // else it hears nothing yet
			time.Sleep(time.Millisecond)
			port, err = netlink.LinkByName("port")
		}
		return err
	}))
}

func setUp(ifname string) error {
	l, err := netlink.LinkByName(ifname)
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(l)
}

// inNetns runs f on a thread of its own in a network namespace.
func inNetns(path string, f func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// excuse REGEXP
func excuseWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 1, 1, "excuse REGEXP")
	re, err := regexp.Compile(args[0])
	ts.Check(err)
	s := storyOf(ts)
	s.excused = append(s.excused, re)
}

// leaks REGEXP
func leaksWord(ts *testscript.TestScript, neg bool, args []string) {
	noNeg(ts, neg)
	count(ts, args, 1, 1, "leaks REGEXP")
	re, err := regexp.Compile(args[0])
	ts.Check(err)
	s := storyOf(ts)
	s.leaking = append(s.leaking, re)
}

// The differential test of stayput and host-local.

var versions = []string{"", "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// alike FILE [adds=N] [from=VERSION] [to=VERSION] [KEY=VALUE...]
func alikeWord(ts *testscript.TestScript, neg bool, args []string) {
	s := storyOf(ts)
	adds, spoken := 3, versions
	var env []string
	var file string
	for _, arg := range args {
		k, v, ok := strings.Cut(arg, "=")
		switch {
		case !ok:
			file = arg
		case k == "adds":
			n, err := strconv.Atoi(v)
			ts.Check(err)
			adds = n
		case k == "from":
			spoken = spoken[slices.Index(spoken, v):]
		case k == "to":
			spoken = spoken[:slices.Index(spoken, v)+1]
		default:
			env = append(env, arg)
		}
	}
	text := ts.ReadFile(file)
	for _, v := range spoken {
		var answers [2][]outcome
		for i, program := range []string{hostLocal, stayput} {
			conf := map[string]any{}
			ts.Check(json.Unmarshal([]byte(strings.ReplaceAll(text, "$WORK", s.work)), &conf))
			dir := filepath.Join(s.work, "alike", "v"+v, filepath.Base(program))
			ts.Check(errors.Join(os.RemoveAll(dir), os.RemoveAll(dir+".state")))
			if conf["name"] = "alike"; v != "" {
				conf["cniVersion"] = v
			}
			if ipam, ok := conf["ipam"].(map[string]any); ok {
				ipam["type"], ipam["dataDir"], ipam["stateDir"] = filepath.Base(program), dir, dir+".state"
			}
			stdin, err := json.Marshal(conf)
			ts.Check(err)
			if neg {
				adds = 0 // only the refused ADD
			}
			answers[i] = s.session(ts, program, env, stdin, adds)
			if neg != (answers[i][0].code != 0) {
				ts.Fatalf("CNI %s: %s: %s", v, filepath.Base(program), answers[i][0])
			}
		}
		for j := range answers[0] {
			theirs, ours := answers[0][j], answers[1][j]
			ts.Check(sameAnswer(v, theirs, ours))
		}
	}
}

// session is the same short life with either plugin: ADDs, a DEL in the middle, another ADD, a CHECK.
func (s *story) session(ts *testscript.TestScript, program string, extra []string, stdin []byte,
	adds int) (out []outcome) {
	call := func(command string, i int) {
		netns, err := s.sandbox(fmt.Sprintf("alike-%d", i))
		ts.Check(err)
		env := []string{
			"CNI_COMMAND=" + command, fmt.Sprintf("CNI_CONTAINERID=c%d", i), "CNI_IFNAME=eth0",
			"CNI_NETNS=" + netns, "CNI_PATH=" + filepath.Dir(stayput),
		}
		out = append(out, s.run(program, append(env, extra...), stdin))
	}
	for i := range adds {
		call("ADD", i)
	}
	if adds == 0 {
		call("ADD", 0)
		return out
	}
	call("DEL", adds/2)
	call("ADD", adds)
	call("CHECK", adds)
	call("ADD", adds) // again without a DEL
	return out
}

// sameAnswer compares two answers as parsed by the CNI library.
func sameAnswer(version string, theirs, ours outcome) error {
	differ := func(why string) error {
		return fmt.Errorf("CNI %s: %s\nhost-local: %sstayput: %s", version, why, theirs, ours)
	}
	if (theirs.code == 0) != (ours.code == 0) {
		return differ("one fails, the other does not")
	}
	if theirs.code != 0 {
		var e types.Error
		if err := json.Unmarshal([]byte(ours.stdout), &e); err != nil || e.Code == 0 || e.Msg == "" {
			return differ("no CNI error")
		}
		return nil
	}
	if theirs.stdout == "" || ours.stdout == "" {
		if theirs.stdout != ours.stdout {
			return differ("one answers, the other does not")
		}
		return nil
	}
	var parsed [2]types.Result
	for i, o := range []outcome{theirs, ours} {
		r, err := create.CreateFromBytes([]byte(o.stdout))
		if err != nil {
			return differ(err.Error())
		}
		if r.Version() != cmp.Or(version, "0.1.0") {
			return differ("version " + r.Version())
		}
		switch r.(type) {
		case *types020.Result, *types040.Result, *types100.Result:
		default:
			return differ(fmt.Sprintf("a %T", r))
		}
		parsed[i] = r
	}
	if !reflect.DeepEqual(parsed[0], parsed[1]) {
		return differ("the results differ")
	}
	return nil
}
