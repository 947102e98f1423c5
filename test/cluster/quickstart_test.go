package cluster

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// quickStart returns the blocks of code in a section of a document, by their language, in their order.
func quickStart(t *testing.T, document, section string) map[string][]string {
	t.Helper()
	data, err := os.ReadFile("../../docs/" + document)
	must.Do(t, err)
	_, text, ok := strings.Cut(string(data), "\n## "+section+"\n")
	if !ok {
		t.Fatalf("%s has no section %q", document, section)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	blocks := map[string][]string{}
	for i, part := range strings.Split(text, "\n```") {
		if language, code, _ := strings.Cut(part, "\n"); i%2 == 1 {
			blocks[language] = append(blocks[language], code)
		}
	}
	return blocks
}

// What docs/pools.md says is typed as it stands there, and answers as it says.
func TestTheQuickStartOfPools(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	const ns = "default" // the quick start names none
	blocks := quickStart(t, "pools.md", "Quick start")
	shell, yaml := blocks[""], blocks["yaml"]
	if len(shell) != 3 || len(yaml) != 2 {
		t.Fatalf("it has %d blocks to type and %d manifests: %q", len(shell), len(yaml), blocks)
	}

	// 1. Pools are switched on, by Helm; the other way is for installations without.
	command := strings.Fields(shell[0])
	if command[0] != "helm" {
		t.Fatalf("the first command is %q", command)
	}
	for i, arg := range command {
		if arg == "deploy/chart" {
			command[i] = "../../" + arg
		}
	}
	_, err := c.Helm(testContext(t), command[1:]...)
	must.Do(t, err)
	must.Do(t, c.WaitInstalled(testContext(t)))

	// 2. There are addresses, and a StatefulSet asks for them.
	apply(t, c, ns, yaml[0])
	deploy(t, c, ns, lab.Workload{Name: "web", Unprobed: true})
	kubectl(t, c, "patch", "statefulset", "web", "--type=merge", "--patch="+yaml[1])
	for replicas := 1; replicas <= 2; replicas++ { // one after the other, as a StatefulSet does by default
		kubectl(t, c, "scale", "statefulset", "web", fmt.Sprint("--replicas=", replicas))
		places(t, c, ns, "web", replicas, nil)
	}
	pods := places(t, c, ns, "web", 2, nil)
	holdTheirAddresses(t, c, pods)

	// 3. It looks as printed, a pod is deleted, and it looks so again.
	var want []map[string]string
	said := strings.Split(shell[2], "$ ")
	if len(said) != 4 || said[0] != "" {
		t.Fatalf("what is typed at last is %q", said)
	}
	look, table, _ := strings.Cut(said[1], "\n")
	for _, pod := range []string{"10.6.168.101", "10.6.168.102"} {
		want = append(want, row(t, table, pod))
	}
	looks := func() {
		t.Helper()
		until(t, "kubectl to print\n"+table, func(context.Context) bool {
			is := kubectl(t, c, strings.Fields(look)[1:]...)
			if strings.Count(is, "\n") != strings.Count(table, "\n") {
				return false
			}
			for _, cells := range want {
				if !strings.Contains(is, "\n"+cells["NAME"]+" ") {
					return false
				}
				got := row(t, is, cells["NAME"])
				for column, cell := range cells {
					switch value, there := got[column]; {
					case !there:
						return false
					case column == "NODE":
						if value != places(t, c, ns, "web", 2, nil)[cells["POD"]].Spec.NodeName {
							return false
						}
					case column != "AGE" && value != cell:
						return false
					}
				}
			}
			return true
		})
	}
	looks()
	kubectl(t, c, strings.Fields(said[2])[1:]...)
	after := map[string]string{}
	for name, pod := range places(t, c, ns, "web", 2, map[string]*corev1.Pod{"web-0": pods["web-0"]}) {
		after[name] = pod.Status.PodIP
	}
	looks()
	why := plugin(t, c, strings.Fields(said[3])[1:]...)
	if why.code != 0 || !strings.Contains(why.out, after["web-0"]+" of pool blue is assigned to it on any node") {
		t.Errorf("%s: %+v", said[3], why)
	}
}
