package chart

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// The value was true once: what the agent put there then is for it to take away.
func TestAnAgentThatInstallsNothingCanStillTakeAwayWhatWasInstalled(t *testing.T) {
	all := objects(t, "default", "agent: {cni: {install: false}}")
	i := slices.IndexFunc(all, func(d Document) bool { return d.Kind == "DaemonSet" })
	var agent appsv1.DaemonSet
	check(t, yaml.Unmarshal([]byte(all[i].Text), &agent))
	container := agent.Spec.Template.Spec.Containers[0]
	for _, name := range []string{"cni-conf", "cni-bin"} {
		i := slices.IndexFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
		if i < 0 || container.VolumeMounts[i].ReadOnly {
			t.Errorf("%s cannot be written: %+v", name, container.VolumeMounts)
		}
	}
	for _, arg := range container.Args {
		if strings.HasPrefix(arg, "--install-cni") {
			t.Errorf("it has %s", arg)
		}
	}
}
