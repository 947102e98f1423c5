package ledger

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"

	"github.com/stayput/stayput/pkg/retention"
)

// Attachment is one interface of one container that the runtime has ADDed: what every DEL names.
type Attachment struct {
	ContainerID, IfName string
}

// PodInterface is what every kubelet runtime calls the interface whose addresses it reports as the pod's.
const PodInterface = "eth0"

// ValidIfName reports whether s can be the name of an interface, as host-local and the kernel decide: any bytes, at
// most 15, but / : and blanks. An address file can say every such name, so that a DEL finds what an ADD wrote.
func ValidIfName(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." &&
		!strings.ContainsFunc(s, func(r rune) bool { return r == '/' || r == ':' || r == 0 || unicode.IsSpace(r) })
}

func (a Attachment) String() string { return a.ContainerID + "/" + a.IfName }

// hash is the name of the attachment's index entry.
func (a Attachment) hash() string { return hashOf(a.ContainerID, a.IfName) }

// Pod is who the runtime said the container belongs to. The zero Pod is no pod of Kubernetes.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"`
}

func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Validate returns an error, in the words of CNI_ARGS, unless Kubernetes can have such a pod. Only such a pod can have
// a claim: runtimes other than kubelet's put arbitrary values into CNI_ARGS.
func (p Pod) Validate() error {
	switch {
	case !isSubdomain(p.Namespace, 63) || strings.Contains(p.Namespace, "."):
		return fmt.Errorf("K8S_POD_NAMESPACE: %.64q is not valid: expected a DNS label", p.Namespace)
	case !isSubdomain(p.Name, 253):
		return fmt.Errorf("K8S_POD_NAME: %.64q is not valid: expected a DNS subdomain", p.Name)
	case len(p.UID) > 128 || strings.ContainsFunc(p.UID, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		return fmt.Errorf("K8S_POD_UID: %.64q is not valid: expected a UID", p.UID)
	}
	return nil
}

// isSubdomain is RFC 1123 as Kubernetes reads it, for names of pods; a namespace is one label of it.
func isSubdomain(s string, most int) bool {
	if len(s) > most {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for i := range len(label) {
			c := label[i]
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return false
			}
		}
	}
	return true
}

// Key names a claim.
type Key struct {
	Network  string `json:"network"`
	Identity string `json:"identity"` // pod:NAMESPACE/NAME or set:NAMESPACE/NAME
	Pod      string `json:"pod"`
	IfName   string `json:"ifname"`
}

// NewKey returns the key of the claim of a pod's interface under a policy. The two kinds of identity are two key
// spaces: a shared identity named as a pod is never that pod.
func NewKey(network string, pod Pod, policy retention.Policy, ifname string) Key {
	// A record is JSON, which cannot say bytes that are no UTF-8.
	k := Key{Network: network, Pod: pod.Name, IfName: strings.ToValidUTF8(ifname, "\uFFFD")}
	if policy.Identity != "" {
		k.Identity = "set:" + pod.Namespace + "/" + policy.Identity
	} else {
		k.Identity = "pod:" + pod.Namespace + "/" + pod.Name
	}
	return k
}

// Namespace returns the namespace that the identity lives in.
func (k Key) Namespace() string {
	_, s, _ := strings.Cut(k.Identity, ":")
	ns, _, _ := strings.Cut(s, "/")
	return ns
}

func (k Key) String() string { return k.Identity + " (" + k.Pod + ", " + k.IfName + ")" }

func (k Key) shared() bool { return strings.HasPrefix(k.Identity, "set:") }

// hash is the claim's file name.
func (k Key) hash() string { return hashOf(k.Network, k.Identity, k.Pod, k.IfName) }

// setHash is the name of the directory of the claims of a shared identity.
func (k Key) setHash() string { return hashOf(k.Identity, k.IfName) }

func hashOf(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:])
}
