package v1alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// hashed matches what ends like the first part of the name of a RetainedIP that a pod's name alone does not make.
var hashed = regexp.MustCompile(`-[0-9a-f]{8}$`)

// RetainedIPName returns the name of the RetainedIP of a pod and node: POD.NODE. POD is the pod's name or, if that has
// a dot, is too long or looks like this itself, as much of it as fits, without dots, and - and 8 hex digits of a
// SHA-256.
//
// Before the node there is no dot, so that a name belongs to one node only: the policy stayput-agent relies on it. Of a
// node whose name is longer than 242 characters, which no kubelet can register, the name is valid and no node's.
func RetainedIPName(pod, node string) string {
	name := pod + "." + node
	if !strings.Contains(pod, ".") && !hashed.MatchString(pod) && len(validation.IsDNS1123Subdomain(name)) == 0 {
		return name
	}
	sum := sha256.Sum256([]byte(pod + "\x00" + node))
	hash := hex.EncodeToString(sum[:4])
	room := validation.DNS1123SubdomainMaxLength - len(".") - len(node)
	if len(validation.IsDNS1123Subdomain(node)) > 0 || room < len(hash)+len("x-") {
		return hash
	}
	readable := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(pod))
	readable = strings.Trim(readable[:min(len(readable), room-len(hash)-len("-"))], "-")
	if readable == "" {
		readable = "x"
	}
	return readable + "-" + hash + "." + node
}
