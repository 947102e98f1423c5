package program

import "github.com/prometheus/client_golang/prometheus"

// BuildInfo is a metric that says which version of a component runs.
func BuildInfo(component string) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stayput_build_info", Help: "1, labelled with the component of stayput that runs here and its version.",
		ConstLabels: prometheus.Labels{"component": component, "version": Version()},
	})
	g.Set(1)
	return g
}
