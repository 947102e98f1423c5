// Package script holds the stories: what the CNI plugin and the ledger do for a pod, told with the real stayput
// and the stock host-local as whole processes, in real network namespaces.
//
// A story is a file testdata/stories/SENTENCE.txtar; its name is the behaviour that it shows. To add one, write the
// file: words a line, "#" begins a paragraph, "!" before a word means that it must fail. One story alone:
//
//	go test ./test/script -run 'TestStories/a-stopped-pod-comes-back-with-its-address$' -v
//
// The stories in testdata/damaged run once for every record on disk ($RECORD) and every damage to it ($HOW).
//
// Each story is a node of its own: a data directory $DATA, in which host-local would keep its addresses, a state
// directory $STATE, and in the end, unasked, the epilogue: ledger.Check finds nothing, then every sandbox is DELed, and
// then no address is bound any more. Every ADD is held against what the story knows: no two owners of one address. The
// tests need root, since they make network and mount namespaces; these are gone with the process.
//
// # Words
//
// A network is described once and again whenever its configuration changes. Without a name the first one is meant.
//
//	network NAME RANGES... [KEY=VALUE...]  RANGES is one range set: SUBNET[@FIRST-LAST][,...];
//	                                       keys of the ipam section, or cniVersion=
//	network NAME from FILE                 the whole configuration from a file of the story
//
// An attachment is C, C/IF, C@NET or C/IF@NET: container, interface (eth0) and network. Where C alone is DELed, all
// attachments of the container are; C may be a pattern such as job-*. $C is the first address that ADD gave.
//
//	add POD C [OPTION...]        ADD for POD, NAMESPACE/POD, or - for a container without K8S_ args;
//	                             the sandbox is made. Options:
//	                             retain=10m, minutes=10, identity=NAME, when-in-use=AllocateNew,
//	                             KEY/WITH-SLASH=VALUE: annotations;
//	                             annotations=unknown: the runtime hands none on;
//	                             ip=, ips=: requested by args, by runtimeConfig;
//	                             uid=; by=host-local: the stock plugin
//	fill C [N]                   ordinary pods C-0, C-1, ..., one after the other, N or until the range is full
//	crowd N POD C [OPTION...]    N ADDs at the same time, a process each; by=both: every second one by host-local
//	del C [times=N] [by=...]     DEL, with the namespace if it is still there; ranges=: under another range;
//	                             annotations as in add
//	remove C [at-once]           what containerd does: DEL, the namespace goes, DEL once more
//	vanish C                     the namespace goes, without a DEL
//	check C [prev=ADDRESS/LEN,...], gc [@NET] missing|null|JSON, gc keep C..., status, version
//	plugin COMMAND FILE [KEY=VALUE...]   the plugin on a file of the story and with this environment
//	begin NAME add ..., begin NAME del C, end NAME   the same in the background
//
// The node:
//
//	advance DURATION             CLOCK_BOOTTIME goes on; the wall clock stands still
//	wallclock DURATION           the wall clock was set forward (or back) after the retained addresses were recorded
//	reboot                       every namespace is gone, another boot ID, CLOCK_BOOTTIME from the beginning
//	damage RECORD C HOW          a record of C is damaged: address, claim, index, mark, marker, last or network
//	damage RECORD C newer|older  the record is one of a newer version of stayput; it is one of ours again
//	disk small|full|roomy|readonly|writable DIRECTORY
//	lock, blocked N, unlock      another process has the network's lock; wait until N wait for it
//
// The agent, as far as it is the ledger's: mark C OPTION..., sweep (expire what is due), uninstall.
//
// What has to be true:
//
//	has C ADDRESS...             what ADD gave
//	same-address C D             and ! same-address; C1,C2 D1,D2 in any order; patterns pair by pair
//	address [@NET] ADDRESS free | bound C | retained POD      what is on the disk
//	bound N, promises N          how many address files are bound, how many claims there are
//	cnierror CODE REGEXP         what the last failure said
//	event REASON POD [REGEXP]    the agent was told, and takes it from the spool
//	snapshot, unchanged          both directories, byte for byte
//	alike FILE [adds=N] [KEY=VALUE...]   stayput and host-local answer the same, in every CNI version;
//	                                     with !, both refuse
//	excuse REGEXP, leaks REGEXP  what the epilogue may find: violations, and addresses that stay bound
//
// and testscript's own: exists, stdout, stderr, exec, rm, env, cmp.
package script
