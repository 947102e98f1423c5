// Package ledger is the book of addresses of one CNI network: which address is bound to which attachment,
// which is retained for which identity, on plain files that stock host-local can read and write.
//
// # What it promises
//
// After every command, and after a crash (kill -9 or power loss) at any system call followed by the next command:
//
//   - I1 an address has at most one owner; no two live attachments share one.
//   - I2 a retained address goes to no other claim before it expires or is released.
//   - I3 a DEL for an attachment never touches an address that is not that attachment's.
//   - I4 an acknowledged ADD of a retained pod is remembered: after a power loss the claim still has that
//     address. A policy that only the agent knows counts from SetPolicy on.
//   - I5 every address that is not free is explained by a live sandbox, an unexpired claim, or is younger
//     than the agent's grace period.
//   - I6 an acknowledged ADD has all its address families or none.
//
// # Files
//
//	<dataDir>/<network>/<ip>                who has the address now: host-local's file, or a retained record
//	<dataDir>/<network>/lock                host-local's flock, held by every command from begin to end
//	<dataDir>/<network>/last_reserved_ip.N  host-local's round robin
//	<dataDir>/<network>/.stayput.boot       the boot of the last rebuild, and how we left the directory
//	<dataDir>/<network>/.stayput.tmp        what an address file is renamed from
//	<stateDir>/<network>-<hash>/claims/     what is promised, durable
//	<stateDir>/<network>-<hash>/index/      attachments: a cache, believed only if the address file agrees
//	<stateDir>/<network>-<hash>/sets/       the claims of each shared identity, a cache
//	<stateDir>/<network>-<hash>/counts      how many claims each namespace has, a cache
//	<stateDir>/<network>-<hash>/network     the network's configuration, for the agent
//
// The formats are drawn above the code that writes them: record.go, counts.go, network.go.
//
// # How it stays whole
//
// Every write is made under the lock. Reads (List, Check, Find, Undecided, Status) change nothing.
//
// A decision (add.go, del.go, adopt.go, expire.go) reads the book and returns steps; apply.go carries them out in their
// order, and write.go knows how a file is written. Each step is atomic (a rename or an unlink), and the order is chosen
// so that each prefix is a state that the next command understands; the decisions give the reason beside each order. At
// the first command of a boot rebuild.go brings everything into agreement.
//
// Only promises and their ends are made durable. A new or changed claim costs two fsyncs (its content, its name), and
// an ADD that promises, restores or ends a promise one more, for the names of the address files: a power loss must not
// bring back what was there before. The content of address files is never fsynced, and a DEL that retains costs none: a
// power loss ends every attachment, and the first command of the next boot writes the files again from the claims.
package ledger
