package v1alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// longestName is the API server's limit for the name of an object.
const longestName = 253

// RetainedIPName is the name of the RetainedIP of a pod and node: POD.NODE. Where that would be no name of an
// object, or could be another pod's and node's (a dot in the pod's name), it ends in - and 8 hex of its sha256.
func RetainedIPName(pod, node string) string {
	name := pod + "." + node
	if !strings.Contains(pod, ".") && isSubdomain(name) {
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
	readable = readable[:min(len(readable), longestName-len(hash)-1)]
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

// isSubdomain follows RFC 1123 as the API server reads it for names.
func isSubdomain(s string) bool {
	if len(s) > longestName {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return false
			}
		}
	}
	return true
}
