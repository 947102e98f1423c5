package v1alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// RetainedIPName returns the name of the RetainedIP of a pod and node: POD.NODE. If that is no valid name, or could
// stand for another pod and node (a dot in the pod's name), it ends in - and 8 hex digits of a SHA-256.
func RetainedIPName(pod, node string) string {
	name := pod + "." + node
	if !strings.Contains(pod, ".") && len(validation.IsDNS1123Subdomain(name)) == 0 {
		return name
	}
	sum := sha256.Sum256([]byte(pod + "\x00" + node))
	hash := hex.EncodeToString(sum[:4])
	readable := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '.' {
			return r
		}
		return '-'
	}, strings.ToLower(name))
	readable = readable[:min(len(readable), validation.DNS1123SubdomainMaxLength-len(hash)-1)]
	var labels []string
	for label := range strings.SplitSeq(readable, ".") {
		if label = strings.Trim(label, "-"); label != "" {
			labels = append(labels, label)
		}
	}
	if len(labels) == 0 {
		return hash
	}
	return strings.Join(labels, ".") + "-" + hash
}
