package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/test/chart"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// prometheus is a Prometheus on the control plane's machine of a cluster. It ends with the cluster.
type prometheus struct {
	client *http.Client
}

const prometheusAddress = "127.0.0.1:9090"

// startPrometheus starts a Prometheus that scrapes what the chart's PodMonitor selects every second, with the rules of
// the chart's PrometheusRule.
func startPrometheus(t *testing.T, c *lab.Cluster) *prometheus {
	t.Helper()
	must.Do(t, lab.Need(testContext(t), "prometheus"))
	program, err := exec.LookPath("prometheus")
	must.Do(t, err)
	monitor, rules := monitors(t)
	config := map[string]any{
		"global":     map[string]any{"scrape_interval": "1s", "evaluation_interval": "1s"},
		"rule_files": []string{"rules.yml"},
	}
	config["scrape_configs"] = scrapeConfigs(t, c, monitor)
	const dir = "/etc/prometheus/"
	for name, content := range map[string]any{"prometheus.yml": config, "rules.yml": rules} {
		data, err := yaml.Marshal(content)
		must.Do(t, err)
		must.Do(t, os.MkdirAll(c.Control.Path(dir), 0o755))
		must.Do(t, c.Control.WriteFile(dir+name, data))
	}
	_, err = c.Control.Start("prometheus", nil, program, "--config.file="+dir+"prometheus.yml",
		"--storage.tsdb.path=/var/tmp/prometheus", "--web.listen-address="+prometheusAddress, "--log.level=warn")
	must.Do(t, err)
	p := &prometheus{client: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return c.Control.Dial(ctx, network, address)
		},
	}}}
	until(t, "Prometheus to be ready", func(ctx context.Context) bool {
		answer, err := p.client.Get("http://" + prometheusAddress + "/-/ready")
		if err != nil {
			return false
		}
		answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
	return p
}

// podMonitor has the fields of a PodMonitor that the chart uses.
type podMonitor struct {
	metav1.TypeMeta
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Selector            metav1.LabelSelector `json:"selector"`
		PodMetricsEndpoints []struct {
			Port        string       `json:"port"`
			Interval    string       `json:"interval"`
			Relabelings []relabeling `json:"relabelings"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

type relabeling struct {
	SourceLabels []string `json:"sourceLabels"`
	Regex        string   `json:"regex"`
	TargetLabel  string   `json:"targetLabel"`
	Replacement  string   `json:"replacement"`
}

// config returns the relabeling in Prometheus' configuration.
func (r relabeling) config() map[string]any {
	config := map[string]any{"target_label": r.TargetLabel}
	if len(r.SourceLabels) > 0 {
		config["source_labels"] = r.SourceLabels
	}
	if r.Regex != "" {
		config["regex"] = r.Regex
	}
	if r.Replacement != "" {
		config["replacement"] = r.Replacement
	}
	return config
}

// monitors returns the chart's PodMonitor and the spec of its PrometheusRule.
func monitors(t *testing.T) (monitor podMonitor, rules any) {
	t.Helper()
	documents, err := chart.Render(testContext(t), "--show-only=templates/60-monitoring.yaml",
		"--set=monitoring.podMonitor.enabled=true,monitoring.prometheusRule.enabled=true")
	must.Do(t, err)
	for _, d := range documents {
		switch d.Kind {
		case "PodMonitor":
			must.Do(t, yaml.UnmarshalStrict([]byte(d.Text), &monitor, yaml.DisallowUnknownFields))
		case "PrometheusRule":
			var o struct{ Spec any }
			must.Do(t, yaml.Unmarshal([]byte(d.Text), &o))
			rules = o.Spec
		}
	}
	if len(monitor.Spec.PodMetricsEndpoints) == 0 || rules == nil {
		t.Fatalf("the chart has no PodMonitor or no PrometheusRule: %+v", documents)
	}
	return monitor, rules
}

// scrapeConfigs returns what the Prometheus operator makes of a PodMonitor: labels for the source of a series, followed
// by the PodMonitor's own relabelings. Debian's Prometheus is built without the discovery of pods, so the labels that
// discovery would add are added here, and the cluster's name, which comes from an operator.
func scrapeConfigs(t *testing.T, c *lab.Cluster, monitor podMonitor) (configs []any) {
	t.Helper()
	list, err := c.Client().CoreV1().Pods(lab.SystemNamespace).List(testContext(t),
		metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(&monitor.Spec.Selector)})
	must.Do(t, err)
	unfit := regexp.MustCompile(`[^a-zA-Z0-9_]`)
	for i, endpoint := range monitor.Spec.PodMetricsEndpoints {
		targets := []any{}
		for _, pod := range list.Items {
			for _, container := range pod.Spec.Containers {
				for _, port := range container.Ports {
					if pod.Status.Phase != corev1.PodRunning || port.Name != endpoint.Port {
						continue
					}
					labels := map[string]string{
						"__meta_kubernetes_namespace":               pod.Namespace,
						"__meta_kubernetes_pod_name":                pod.Name,
						"__meta_kubernetes_pod_node_name":           pod.Spec.NodeName,
						"__meta_kubernetes_pod_container_name":      container.Name,
						"__meta_kubernetes_pod_container_port_name": port.Name,
					}
					for name, value := range pod.Labels {
						labels["__meta_kubernetes_pod_label_"+unfit.ReplaceAllString(name, "_")] = value
					}
					address := net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(port.ContainerPort)))
					targets = append(targets, map[string]any{"targets": []string{address}, "labels": labels})
				}
			}
		}
		relabelings := []any{}
		for _, r := range append([]relabeling{
			{SourceLabels: []string{"__meta_kubernetes_namespace"}, TargetLabel: "namespace"},
			{SourceLabels: []string{"__meta_kubernetes_pod_container_name"}, TargetLabel: "container"},
			{SourceLabels: []string{"__meta_kubernetes_pod_name"}, TargetLabel: "pod"},
			{TargetLabel: "job", Replacement: lab.SystemNamespace + "/stayput"},
			{TargetLabel: "endpoint", Replacement: endpoint.Port},
			{TargetLabel: "cluster", Replacement: "lab"},
		}, endpoint.Relabelings...) {
			relabelings = append(relabelings, r.config())
		}
		configs = append(configs, map[string]any{
			"job_name":        fmt.Sprintf("podMonitor/%s/stayput/%d", lab.SystemNamespace, i),
			"static_configs":  targets,
			"relabel_configs": relabelings,
		})
	}
	return configs
}

// targets returns the URLs that Prometheus scrapes.
func (p *prometheus) targets(t *testing.T) (urls []string) {
	t.Helper()
	var data struct{ ActiveTargets []struct{ ScrapeURL string } }
	p.ask(t, "targets?state=active", &data)
	for _, target := range data.ActiveTargets {
		urls = append(urls, target.ScrapeURL)
	}
	return urls
}

func (p *prometheus) get(t *testing.T, address string) string {
	t.Helper()
	answer, err := p.client.Get(address)
	must.Do(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	must.Do(t, err)
	if answer.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s: %s", address, answer.Status, body)
	}
	return string(body)
}

// ask decodes an answer of Prometheus' API.
func (p *prometheus) ask(t *testing.T, path string, into any) {
	t.Helper()
	answer := struct{ Data any }{into}
	must.Do(t, json.Unmarshal([]byte(p.get(t, "http://"+prometheusAddress+"/api/v1/"+path)), &answer))
}

// query returns the current series of an expression.
func (p *prometheus) query(t *testing.T, expr string) []map[string]string {
	t.Helper()
	var data struct {
		ResultType string
		Result     json.RawMessage
	}
	p.ask(t, "query?query="+url.QueryEscape(expr), &data)
	if data.ResultType != "vector" {
		return nil
	}
	var result []struct{ Metric map[string]string }
	must.Do(t, json.Unmarshal(data.Result, &result))
	all := make([]map[string]string, len(result))
	for i, r := range result {
		all[i] = r.Metric
	}
	return all
}

func (p *prometheus) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	until(t, what, func(context.Context) bool { return ok() })
}

// rose reports whether a counter's series, which may have labels, has risen since Prometheus started.
func (p *prometheus) rose(t *testing.T, series string) bool {
	t.Helper()
	return len(p.query(t, "max_over_time("+series+"[1h]) - min_over_time("+series+"[1h]) > 0")) > 0
}

// moved waits until all these series have risen.
func (p *prometheus) moved(t *testing.T, series ...string) {
	t.Helper()
	for _, s := range series {
		p.until(t, s+" to rise", func() bool { return p.rose(t, s) })
	}
}

// kinds returns the declared types of metrics, by every name that a query may use.
func (p *prometheus) kinds(t *testing.T) map[string]string {
	t.Helper()
	var data map[string][]struct{ Type string }
	p.ask(t, "metadata", &data)
	kinds := map[string]string{}
	for name, declared := range data {
		kind := declared[0].Type
		kinds[name] = kind
		if slices.Contains([]string{"histogram", "summary"}, kind) {
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				kinds[name+suffix] = kind
			}
		}
	}
	return kinds
}

type ruleState struct {
	Name, Health, LastError string
}

func (p *prometheus) rules(t *testing.T) (all []ruleState) {
	t.Helper()
	var data struct{ Groups []struct{ Rules []ruleState } }
	p.ask(t, "rules", &data)
	for _, g := range data.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Error("Prometheus has no rules")
	}
	return all
}
