package ipam

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
)

// fuzzCall is one call of the plugin as a runtime could make it, however odd.
type fuzzCall struct {
	stdin []byte
	env   map[string]string
}

func (c fuzzCall) run(t *testing.T, command string) (code int, stdout string) {
	var out, errs bytes.Buffer
	p := &Plugin{
		Getenv: func(k string) string {
			if k == "CNI_COMMAND" {
				return command
			}
			return c.env[k]
		},
		Stdin: bytes.NewReader(c.stdin), Stdout: &out, Stderr: &errs,
		Exit: func(int) { t.Fatal("the lock could not be had") },
	}
	code = p.Run()
	if code == 0 {
		return 0, out.String()
	}
	var e Error
	if err := json.Unmarshal(out.Bytes(), &e); err != nil || code != 1 || e.Code == 0 || e.Msg == "" ||
		!netconf.Speaks(e.CNIVersion) {
		t.Fatalf("%s: exit status %d without a CNI error: %v: %s", command, code, err, out.String())
	}
	if out.Len() > 4096 {
		t.Fatalf("%s: an error of %d bytes", command, out.Len())
	}
	return int(e.Code), out.String()
}

// confine turns a configuration into one whose files lie in dir. ok is false if that cannot be made sure of.
func confine(stdin []byte, dir string) (out []byte, data string, ok bool) {
	if _, err := netconf.Parse(stdin); err != nil {
		return stdin, "", true // it fails before it touches a file
	}
	var conf, section map[string]json.RawMessage
	if json.Unmarshal(stdin, &conf) != nil {
		return nil, "", false
	}
	for k := range conf {
		if strings.EqualFold(k, "ipam") {
			if json.Unmarshal(conf[k], &section) != nil || section == nil {
				return nil, "", false
			}
			for s := range section {
				for _, f := range []string{"dataDir", "stateDir", "resolvConf"} {
					if strings.EqualFold(s, f) {
						delete(section, s)
					}
				}
			}
			data = filepath.Join(dir, "data")
			section["dataDir"], _ = json.Marshal(data)
			section["stateDir"], _ = json.Marshal(filepath.Join(dir, "state"))
			conf[k], _ = json.Marshal(section)
		}
	}
	out, err := json.Marshal(conf)
	if err != nil {
		return nil, "", false
	}
	c, cerr := netconf.Parse(out)
	return out, data, cerr == nil && c.DataDir == data && strings.HasPrefix(c.StateDir, dir)
}

// addressFiles are the files of addresses, with their content.
func addressFiles(t *testing.T, dir string) map[string]string {
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if _, err := netip.ParseAddr(d.Name()); err == nil && d.Type().IsRegular() {
			b, err := os.ReadFile(path)
			files[d.Name()] = string(b)
			return err
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return files
}

func FuzzRun(f *testing.F) {
	const good = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;K8S_POD_UID=u"
	for _, s := range []struct{ stdin, args string }{
		{`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24"}}`, good},
		{
			`{"cniVersion":"0.3.1","name":"podnet","ipam":{"ranges":[[{"subnet":"10.1.0.0/29","rangeStart":"10.1.0.3","rangeEnd":"10.1.0.4","gateway":"10.1.0.3"}],[{"subnet":"fd00::/64"}]]}}`, good,
		},
		{
			`{"cniVersion":"1.0.0","name":"podnet","ipam":{"ranges":[[{"subnet":"10.1.0.0/24"}]],"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.9","mtu":1400}]},"runtimeConfig":{"ips":["10.1.0.77"],"ipRanges":[[{"subnet":"10.2.0.0/24"}]],"io.kubernetes.cri.pod-annotations":{"stayput.io/retain-ip":"10m"}}}`, good,
		},
		{
			`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24","longestRetention":"1h","promisedShare":0.5},"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"stayput.io/retain-ip":"while-owned","stayput.io/identity":"web","stayput.io/when-in-use":"AllocateNew"}}}`, good,
		},
		{
			`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24"},"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"io.kubernetes.cri/reserved-ip-duration":"10"}}}`, good,
		},
		{
			`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24"},"args":{"cni":{"ips":["10.1.0.5/24"]}},"prevResult":{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.5/24"}]}}`, "IP=10.1.0.5",
		},
		{
			`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24"},"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]}`, "",
		},
		{`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24"},"cni.dev/valid-attachments":null}`, ""},
		{
			`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"::/0","rangeEnd":"ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}}`, good,
		},
		{`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"0.0.0.0/0","rangeStart":"255.255.255.255"}}`, good},
		{`{"CNIVERSION":"1.1.0","Name":"podnet","IPAM":{"Subnet":"10.1.0.0/24","SUBNET":"10.2.0.0/24"}}`, good},
		{`{"cniVersion":"1.1.0","name":"../x","ipam":{}}`, "K8S_POD_NAMESPACE=..;K8S_POD_NAME=../../x"},
		{`{"ipam":[]}`, "a=b=c"},
		{`{"cniVersion":"0.2.0","name":"podnet","ipam":{"ranges":[[{"subnet":"fd00::/64"}],[{"subnet":"10.1.0.0/24"}]],"routes":[{"dst":"::/0"}]}}`, good},
		{`{"name":"podnet","ipam":{"ranges":[[{"subnet":"10.1.0.0/24"}],[{"subnet":"10.2.0.0/24"}]]}}`, good},
		{`{"cniVersion":7,"name":"podnet","ipam":{"subnet":"10.1.0.0/24"}}`, good},
		{`null`, ";"},
		{``, ""},
	} {
		f.Add([]byte(s.stdin), s.args, "c1", "eth0", "/run/netns/none")
	}
	f.Add([]byte(`{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24"}}`), good, "../../etc/passwd",
		"eth0/..", "")
	const retained = `{"cniVersion":"1.1.0","name":"podnet","ipam":{"subnet":"10.1.0.0/24"},"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"stayput.io/retain-ip":"10m"}}}`
	for _, ifname := range []string{"netzwerk-ü", "接口0", "\x01", "a\x7f", "eth\xff", "eth\xff\xfe", "\u2003x", "x\u2003", "{", "ø\x00", "a\u0085"} {
		f.Add([]byte(retained), good, "c1", ifname, "/run/netns/none")
		f.Add([]byte(retained), "", "c1", ifname, "/run/netns/none")
	}
	f.Fuzz(live)
}

// FuzzRunFields finds its way to the fields faster than through the syntax of JSON.
func FuzzRunFields(f *testing.F) {
	f.Add("1.1.0", "10.1.0.0/24", "", "", "", "fd00::/64", "", "0.0.0.0/0", "10m", "default", "web-0")
	f.Add("0.3.1", "10.1.0.0/16", "10.1.2.3", "10.1.2.9", "10.1.2.3", "", "10.1.2.4/16", "", "while-owned", "", "")
	f.Add("1.0.0", "10.1.0.0/30", "10.1.0.1", "10.1.0.1", "10.1.0.1", "", "", "", "-1", "default", "..")
	f.Add("1.0.0", "::/0", "ffff::ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "", "0.0.0.0/0", "::ffff:1.2.3.4", "",
		"720h", "a", "b")
	f.Add("0.4.0", "10.1.0.0/24", "10.1.0.255", "", "", "", "", "", "", "a", "b")
	f.Fuzz(func(t *testing.T, version, subnet, start, end, gateway, second, ip, dst, retain, namespace, pod string) {
		section := map[string]any{"subnet": subnet, "rangeStart": start, "rangeEnd": end, "gateway": gateway}
		if second != "" {
			section["ranges"] = []any{[]any{map[string]any{"subnet": second}}}
		}
		if dst != "" {
			section["routes"] = []any{map[string]any{"dst": dst}}
		}
		runtime := map[string]any{}
		if ip != "" {
			runtime["ips"] = []string{ip}
		}
		if retain != "" {
			runtime[netconf.AnnotationsCapability] = map[string]string{retention.AnnotationRetainIP: retain}
		}
		stdin, err := json.Marshal(map[string]any{"cniVersion": version, "name": "podnet", "ipam": section,
			"runtimeConfig": runtime})
		if err != nil {
			return
		}
		live(t, stdin, "IgnoreUnknown=1;K8S_POD_NAMESPACE="+namespace+";K8S_POD_NAME="+pod, "c1", "eth0", "/run/netns/none")
	})
}

// live is the whole life of one attachment under one configuration, and what must be true of it whatever the
// input says.
func live(t *testing.T, stdin []byte, args, id, ifname, netns string) {
	dir := t.TempDir()
	stdin, data, ok := confine(stdin, dir)
	if !ok {
		return
	}
	c := fuzzCall{stdin, map[string]string{
		"CNI_ARGS": args, "CNI_CONTAINERID": id, "CNI_IFNAME": ifname, "CNI_NETNS": netns, "CNI_PATH": dir,
	}}
	conf, _ := netconf.Parse(stdin)

	code, stdout := c.run(t, "ADD")
	taken := addressFiles(t, dir)
	if code == 0 {
		var res struct {
			CNIVersion string
			IPs        []struct{ Address netip.Prefix }
			IP4, IP6   struct{ IP netip.Prefix } // before 0.3.0
		}
		if err := json.Unmarshal([]byte(stdout), &res); err != nil || res.CNIVersion != conf.CNIVersion {
			t.Fatalf("ADD answered %q: %v", stdout, err)
		}
		n, err := conf.Network()
		if err == nil && !atLeast(conf.CNIVersion, "0.3.0") {
			for _, set := range n.Ranges {
				old := res.IP4.IP
				if set[0].Start.Is6() {
					old = res.IP6.IP
				}
				res.IPs = append(res.IPs, struct{ Address netip.Prefix }{old})
			}
		}
		if err != nil || len(res.IPs) != len(n.Ranges) || len(taken) != len(n.Ranges) {
			t.Fatalf("ADD gave %v of %v, and %v is recorded: %v", res.IPs, n, taken, err)
		}
		for i, ip := range res.IPs {
			a := ip.Address.Addr()
			inRange := slices.ContainsFunc(n.Ranges[i], func(r ledger.Range) bool { return r.Contains(a) && r.Gateway != a })
			if !inRange || taken[a.String()] != id+"\r\n"+ifname {
				t.Fatalf("ADD gave %s: in range: %v; its file says %q", a, inRange, taken[a.String()])
			}
		}
		if again, _ := c.run(t, "ADD"); again == 0 {
			t.Fatal("a second ADD of the same attachment succeeded")
		}
		c.run(t, "CHECK")
	} else if len(taken) > 0 {
		t.Fatalf("ADD failed with %s and took %v", stdout, taken)
	}

	// Commands that nothing is expected of but a proper answer. A GC may end the attachment.
	c.run(t, "STATUS")
	c.run(t, "GC")

	// A DEL fails only if the call cannot be understood, and then the ADD failed too.
	for range 2 {
		if del, answer := c.run(t, "DEL"); del == 0 && answer != "" {
			t.Fatalf("DEL answered %q", answer)
		} else if del != 0 && (code == 0 ||
			!slices.Contains([]int{codeInvalidEnv, codeDecoding, codeInvalidConfig}, del)) {
			t.Fatalf("DEL failed: %s", answer)
		}
	}
	for a, content := range addressFiles(t, dir) {
		if !strings.HasPrefix(content, "{") {
			t.Fatalf("after the DEL %s is still bound: %q", a, content)
		}
	}
	ledgers, err := ledger.Networks(ledger.Options{StateDir: filepath.Join(dir, "state")})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range ledgers {
		if bad, err := l.Check(); err != nil || len(bad) > 0 {
			t.Fatalf("%s: %v %v", data, bad, err)
		}
	}
}

func FuzzParseArgs(f *testing.F) {
	for _, s := range []string{"", ";", "=", "a=b", "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b", "IP=10.0.0.1/24",
		"K8S_POD_NAME=..;K8S_POD_NAMESPACE=../.."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, args string) {
		p, err := parseArgs(args)
		if err != nil {
			if len(err.Error()) > 64*len(args)+1024 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		if (p.pod.Name == "") != (p.pod.Namespace == "") {
			t.Errorf("half a pod: %+v", p.pod)
		}
		if strings.ContainsAny(p.pod.Name+p.pod.Namespace, "/\x00\n ") || len(p.pod.Name) > 253 || len(p.pod.Namespace) > 63 {
			t.Errorf("no pod of Kubernetes: %+v", p.pod)
		}
	})
}
