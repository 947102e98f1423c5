package program

import "github.com/prometheus/client_golang/prometheus"

// BuildInfo returns the metric of a component's version.
func BuildInfo(component string) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stayput_build_info", Help: "Always 1, labelled with the running component of stayput and its version.",
		ConstLabels: prometheus.Labels{"component": component, "version": Version()},
	})
	g.Set(1)
	return g
}
