// Package cli is kubectl stayput. It reads the API server as the user who runs it, and nodes through their agents.
//
//	command.go    the command and what its verbs share: flags, clients
//	get.go        lists what is kept; kept.go is the one view of RetainedIPs and PodIPs
//	why.go        tells the story of one pod:
//	                facts.go reads all that it is told from, story.go tells it,
//	                events.go, promise.go, placement.go and forecast.go are its sections
//	release.go    gives addresses up; consent.go asks before that and before an import
//	node.go       lists a node's addresses
//	check.go      diagnoses: check_cluster.go the cluster, check_policies.go its admission policies,
//	                check_node.go its nodes, clock.go their clocks
//	preflight.go  tells what would work in a cluster without Stayput
//	import.go     takes over what other programs keep: spiderpool.go reads Spiderpool's objects, adopt.go makes pools of
//	                them
//	pools.go      what check, why and node say of pools
//	agents.go     runs stayput-agent on a node
//	complete.go   completes arguments in a shell
//	output.go     prints: tables, JSON and YAML, numbers
//	terminal.go   width, progress
//
// A verb writes what was asked for to the command's standard output and everything else to its standard error. It
// says what it could not find out; it never shows the unknown as nothing.
package cli
