// Package script holds the stories: what the CNI plugin and the ledger do for a pod, with the real stayput and the
// stock host-local as whole processes in real network namespaces.
//
// A story is a file testdata/stories/SENTENCE.txtar, named after the behaviour it shows. To add one, write the file:
// one command a line, "#" begins a paragraph, "!" before a command means that it must fail. To run a single story:
//
//	go test ./test/script -run 'TestStories/a-stopped-pod-comes-back-with-its-address$' -v
//
// The stories in testdata/damaged run once for every record on disk ($RECORD) and every kind of damage ($HOW).
//
// Each story is a node of its own: a data directory $DATA, in host-local's format, a state directory $STATE, and an
// automatic epilogue: ledger.Check finds nothing, every sandbox is DELed, and no address remains bound. The story
// checks after every ADD that no address has two owners. The tests need root because they make network and mount
// namespaces, which end with the process.
//
// # Words
//
// A network is described once, and again whenever its configuration changes. Without @NET the first one is meant.
//
//	network NAME RANGES... [KEY=VALUE...]  RANGES is one range set: SUBNET[@FIRST-LAST][,...];
//	                                       keys of the ipam section, or cniVersion=
//	network NAME from FILE                 the whole configuration from a file of the story
//
// An attachment is C, C/IF, C@NET or C/IF@NET: container, interface (eth0) and network. In del, C alone stands for all
// attachments of the container; C may be a pattern such as job-*. $C is the first address assigned by ADD.
//
//	add POD C [OPTION...]        ADD for POD, NAMESPACE/POD, or - for a container without K8S_ args;
//	                             the sandbox is made. Options:
//	                             retain=10m, minutes=10, identity=NAME, when-in-use=AllocateNew,
//	                             KEY/WITH-SLASH=VALUE: annotations;
//	                             annotations=unknown: the runtime passes none on;
//	                             ip=, ips=: requested by args, by runtimeConfig;
//	                             addresses=FILE: what the controller has given of pools, as an annotation, and the
//	                             agent has granted; claims=FILE: the annotation alone;
//	                             uid=; by=host-local: the stock plugin
//	fill C [N]                   ordinary pods C-0, C-1, ..., one after another, N or until the range is full
//	crowd N POD C [OPTION...]    N concurrent ADDs, a process each; by=both: every second by host-local
//	del C [times=N] [by=...]     DEL, with the namespace if it still exists; ranges=: under another range;
//	                             annotations as in add
//	remove C [at-once]           as containerd does: DEL, the namespace is removed, DEL again
//	vanish C                     the namespace is removed without a DEL
//	check C [prev=ADDRESS/LEN,...], gc [@NET] missing|null|JSON, gc keep C..., status, version
//	plugin COMMAND FILE [KEY=VALUE...]   the plugin with a file of the story and this environment
//	begin NAME add ..., begin NAME del C, end NAME   the same in the background
//
// The node:
//
//	advance DURATION             CLOCK_BOOTTIME advances; the wall clock stands still
//	wallclock DURATION           the wall clock is set forward (or back) after addresses were retained
//	reboot                       every namespace is gone, a new boot ID, CLOCK_BOOTTIME restarts
//	damage RECORD C HOW          a record of C is damaged: address, claim, index, marker, last, network or counts
//	damage RECORD C newer|older  the record becomes a newer version's; it becomes ours again
//	disk small|full|roomy|readonly|writable DIRECTORY
//	wire C/IF [ADDRESS...]       the sandbox with this interface, and a machine on its link that has these addresses
//	lock, blocked N, unlock      another process holds the network's lock; wait until N are blocked
//
// The ledger's part of the agent: policy C OPTION..., sweep (expire what is due), uninstall; grant UID FILE (the pod
// may have these addresses of pools) and revoke UID (it may have none any more; with !, it has some); serves
// [SUBNET...] [gateway=ADDRESS] [spiderpool=on] (the cluster has these pools, without a subnet any) and serves none.
//
// Assertions:
//
//	has C ADDRESS...             the addresses assigned by ADD
//	same-address C D             and ! same-address; C1,C2 D1,D2 in any order; patterns pair by pair
//	same-first C D               the first address of each
//	address [@NET] ADDRESS free | bound C | retained POD      the state on disk
//	bound N, promises N          the numbers of bound address files and of claims
//	cnierror CODE REGEXP         the last failure
//	event REASON POD [REGEXP]    the agent finds the event in the spool
//	snapshot, unchanged          both directories, byte for byte
//	alike FILE [adds=N] [from=VERSION] [to=VERSION] [KEY=VALUE...]
//	                             stayput and host-local answer the same, in every CNI version or in these; with !, both
//	                             refuse
//	excuse REGEXP, leaks REGEXP  what the epilogue may find: violations, addresses that remain bound
//
// and testscript's own: exists, stdout, stderr, exec, rm, env, cmp.
package script
