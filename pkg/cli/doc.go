// Package cli is kubectl stayput: what people ask and do about addresses that are kept. It reads the API server as
// the user who runs it, and nodes through their agents.
//
//	command.go    the command and what its verbs share: flags, clients
//	get.go        what is kept where, why and until when
//	why.go        one pod's story; forecast.go what would happen if it were deleted now
//	release.go    gives addresses up
//	node.go       a node's ranges as a map
//	check.go      a diagnosis of nodes and cluster; findings.go what is held against what
//	import.go     what other programs keep, taken over
//	inspect.go    how a node is looked into
//	complete.go   shell completion
//	terminal.go   width, colour, progress
//
// Verbs write what was asked for to the command's standard output and everything else to its standard error. What
// they cannot find out they say; they never show it as nothing.
package cli
