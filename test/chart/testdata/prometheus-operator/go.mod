// What the definitions PodMonitor and PrometheusRule are taken from: files of this module.
module github.com/stayput/stayput/test/chart/testdata/prometheus-operator

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.85.0
