// Package flood sends real controllers, within the chart's limit of memory, what any client on the network or any
// author of objects can, and checks that they outlive it. It takes a cluster of its own, so it has a build tag and a
// Makefile target: make floods.
//
//	main_test.go     the cluster, and whether a controller has outlived a flood
//	webhook_test.go  requests and connections to the controllers' ports
//	pods_test.go     the largest pods that an author can create
package flood
