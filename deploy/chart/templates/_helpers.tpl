{{/* The labels of every object: (list . component). */}}
{{- define "stayput.labels" -}}
{{- $ := index . 0 -}}
{{ include "stayput.selector" . }}
app.kubernetes.io/part-of: stayput
app.kubernetes.io/managed-by: {{ $.Release.Service }}
app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
{{- end }}

{{/* The labels by which the pods of a component are known. They can never change: (list . component). */}}
{{- define "stayput.selector" -}}
app.kubernetes.io/name: stayput
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "stayput.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/*
What gates pods: a version of admissionregistration.k8s.io that has MutatingAdmissionPolicies, Webhook or Template. Helm
knows the server's kinds where it speaks to one; otherwise, as with helm template, the version has to do.
*/}}
{{- define "stayput.gate" -}}
{{- $served := "" -}}
{{- with .Capabilities -}}
{{- if .APIVersions.Has "v1/Pod" -}}
{{- range $version := list "v1beta1" "v1" -}}
{{- if $.Capabilities.APIVersions.Has (printf "admissionregistration.k8s.io/%s/MutatingAdmissionPolicy" $version) -}}
{{- $served = $version -}}
{{- end -}}
{{- end -}}
{{- else if semverCompare ">=1.36.0-0" .KubeVersion.Version -}}
{{- $served = "v1" -}}
{{- else if and (eq $.Values.gate.mechanism "Policy") (semverCompare ">=1.34.0-0" .KubeVersion.Version) -}}
{{- $served = "v1beta1" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.gate.mechanism "Auto" -}}
{{ $served | default "Webhook" }}
{{- else if ne .Values.gate.mechanism "Policy" -}}
{{ .Values.gate.mechanism }}
{{- else if $served -}}
{{ $served }}
{{- else -}}
{{- fail (printf "gate.mechanism: this API server, %s, has no MutatingAdmissionPolicies (Kubernetes 1.36, or v1beta1 from 1.34 on): expected Auto, Webhook or Template" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end }}

{{/*
The version of the policies to install, and whether to install the webhook. While one takes the other's place both are
there, for one release: a policy is in force only a second or two after it was made, a webhook once a controller serves
it. What is gated already neither gates again.
*/}}
{{- define "stayput.gatePolicies" -}}
{{- $gate := include "stayput.gate" . -}}
{{- if hasPrefix "v1" $gate -}}
{{ $gate }}
{{- else if and (eq $gate "Webhook") (not (include "stayput.webhookThere" .)) -}}
{{- range $version := list "v1" "v1beta1" -}}
{{- if $.Capabilities.APIVersions.Has (printf "admissionregistration.k8s.io/%s/MutatingAdmissionPolicy" $version) -}}
{{- if include "stayput.policiesThere" $version }}{{ $version }}{{ end -}}
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "stayput.gateWebhook" -}}
{{- $gate := include "stayput.gate" . -}}
{{- if eq $gate "Webhook" -}}
true
{{- else if and (hasPrefix "v1" $gate) (include "stayput.webhookThere" .) (not (include "stayput.policiesThere" $gate)) -}}
true
{{- end -}}
{{- end }}

{{/* Whether the cluster has the webhook, and the policies, of the version given. */}}
{{- define "stayput.webhookThere" -}}
{{- if lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "stayput-gate" }}true{{ end -}}
{{- end }}

{{- define "stayput.policiesThere" -}}
{{- if lookup (printf "admissionregistration.k8s.io/%s" .) "MutatingAdmissionPolicyBinding" "" "stayput-gate-recorded" }}true{{ end -}}
{{- end }}

{{/*
The condition, in CEL, on which pods are gated for what their own annotations ask, for policies and webhook alike (pkg/home,
Annotated; pkg/pool, AsksItself). Addresses of pools count if the controller may list PodIPPools, Spiderpool's words if it
may list SpiderIPPools: an expression may ask the authorizer twice, a third time exceeds its cost limit. That the
controller may ungate the pod comes last: few pods get that far. It is asked here, because a policy that matches and
changes nothing still has the pod encoded, decoded and admitted once more.
*/}}
{{- define "stayput.annotatedPods" -}}
has(object.metadata.annotations) && (
{{- if .Values.agent.enabled }}
object.metadata.annotations[?'stayput.io/retain-ip'].orValue(
object.metadata.annotations[?'io.kubernetes.cri/reserved-ip-duration'].orValue('none')) != 'none' ||
{{- end }}
('stayput.io/pools' in object.metadata.annotations ? object.metadata.annotations['stayput.io/pools'] != '' &&
{{ include "stayput.mayList" (list . "stayput.io" "podippools") }} :
[{{ include "stayput.spiderpoolOfPods" . }}].exists(k,
object.metadata.annotations[?k].orValue('') != '') &&
{{ include "stayput.mayList" (list . "spiderpool.spidernet.io" "spiderippools") }})) &&
!object.spec.?hostNetwork.orValue(false) &&
!({{ include "stayput.isLabelled" . }} && ({{ include "stayput.isGated" . }} || !({{ include "stayput.canBeGated" . }}))) &&
{{ include "stayput.mayGate" . }}
{{- end }}

{{/*
The mutation that labels a pod, and gates it if it can be gated: the controller watches the pods with the label. A JSON
patch, because an apply configuration refuses pods with two environment variables of one name; and maps in it, because the API server
panics at a list of Object.spec.schedulingGates (1.36.3).
*/}}
{{- define "stayput.gatePod" -}}
[has(object.metadata.labels) ?
JSONPatch{op: "add", path: "/metadata/labels/stayput.io~1managed", value: "true"} :
JSONPatch{op: "add", path: "/metadata/labels", value: {"stayput.io/managed": "true"}}] +
({{ include "stayput.isGated" . }} || !({{ include "stayput.canBeGated" . }}) ? [] :
object.spec.?schedulingGates.orValue([]).size() > 0 ?
[JSONPatch{op: "add", path: "/spec/schedulingGates/-", value: {"name": "stayput.io/placement"}}] :
[JSONPatch{op: "add", path: "/spec/schedulingGates", value: [{"name": "stayput.io/placement"}]}])
{{- end }}

{{- define "stayput.isGated" -}}
object.spec.?schedulingGates.orValue([]).exists(g, g.name == 'stayput.io/placement')
{{- end }}

{{- define "stayput.isLabelled" -}}
object.metadata.?labels[?'stayput.io/managed'].hasValue()
{{- end }}

{{/* Whether the gate or the label is missing: a pod template may have the gate. */}}
{{- define "stayput.isUngated" -}}
!({{ include "stayput.isGated" . }} && {{ include "stayput.isLabelled" . }})
{{- end }}

{{/* Whether a new pod has what Stayput writes on pods, so that it is a copy of one. */}}
{{- define "stayput.isCopy" -}}
['stayput.io/addresses', 'stayput.io/pinned'].exists(k, k in object.metadata.?annotations.orValue({}))
{{- end }}

{{/* Whether a namespace's annotations name pools for its pods (pkg/pool, AsksByDefault). */}}
{{- define "stayput.namespaceAsks" -}}
(object.metadata.?annotations[?'stayput.io/pools'].hasValue() ?
object.metadata.annotations['stayput.io/pools'] != '' :
[{{ include "stayput.spiderpoolOfNamespaces" . }}].exists(k,
object.metadata.?annotations[?k].orValue('') != ''))
{{- end }}

{{/*
A policy that keeps a label, stayput.io/NAME, on the namespaces of which an expression is true, and on no other, in the
very write that changes one or the other: neither is there without the other for a moment. (list . NAME expression)
*/}}
{{- define "stayput.labelOfNamespaces" -}}
{{- $name := index . 1 -}}
apiVersion: admissionregistration.k8s.io/{{ include "stayput.gatePolicies" (index . 0) }}
kind: MutatingAdmissionPolicy
metadata:
  name: stayput-{{ $name }}
  labels:
    {{- include "stayput.labels" (list (index . 0) "admission") | nindent 4 }}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules:
    - apiGroups: [""]
      apiVersions: [v1]
      operations: [CREATE, UPDATE]
      resources: [namespaces]
      scope: Cluster
  matchConditions:
  - name: is-labelled-wrongly
    expression: >-
      ('stayput.io/{{ $name }}' in object.metadata.?labels.orValue({})) !=
      {{- index . 2 | nindent 6 }}
  mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: >-
        'stayput.io/{{ $name }}' in object.metadata.?labels.orValue({}) ?
        [JSONPatch{op: "remove", path: "/metadata/labels/stayput.io~1{{ $name }}"}] :
        has(object.metadata.labels) ?
        [JSONPatch{op: "add", path: "/metadata/labels/stayput.io~1{{ $name }}", value: ""}] :
        [JSONPatch{op: "add", path: "/metadata/labels", value: {"stayput.io/{{ $name }}": ""}}]
{{- end }}

{{/* The annotations of a namespace that are defaults of the pods in it which retain their addresses. */}}
{{- define "stayput.defaults" -}}
'stayput.io/retain-ip', 'stayput.io/home', 'stayput.io/home-wait', 'stayput.io/when-in-use', 'stayput.io/when-scaled',
'stayput.io/when-deleted', 'stayput.io/when-moved'
{{- end }}

{{/* A gated pod with a node is invalid; DaemonSets pin their pods anyway. */}}
{{- define "stayput.canBeGated" -}}
object.spec.?nodeName.orValue('') == '' &&
!object.metadata.?ownerReferences.orValue([]).exists(o,
o.kind == 'DaemonSet' && o.?controller.orValue(false))
{{- end }}

{{/* That the controller may ungate what is gated: see the ClusterRole stayput-gate. */}}
{{- define "stayput.mayGate" -}}
authorizer.serviceAccount('{{ .Release.Namespace }}', 'stayput-controller').group('stayput.io').resource('placements').check('gate').allowed()
{{- end }}

{{/* That the controller serves objects: (list . group resource). */}}
{{- define "stayput.mayList" -}}
authorizer.serviceAccount('{{ (index . 0).Release.Namespace }}', 'stayput-controller').group('{{ index . 1 }}').resource('{{ index . 2 }}').check('list').allowed()
{{- end }}

{{/* What every part of the webhook has: (list . path). What takes the gate off must start without it. */}}
{{- define "stayput.webhook" -}}
{{- $ := index . 0 -}}
clientConfig:
  service:
    name: stayput-gate
    namespace: {{ $.Release.Namespace }}
    path: {{ index . 1 }}
failurePolicy: Ignore
timeoutSeconds: 2
sideEffects: None
reinvocationPolicy: Never
admissionReviewVersions: [v1]
rules:
- apiGroups: [""]
  apiVersions: [v1]
  operations: [CREATE]
  resources: [pods]
  scope: Namespaced
namespaceSelector:
  matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values: [{{ $.Release.Namespace }}]
{{- end }}

{{/* The variables of every container that speaks to the API server. */}}
{{- define "stayput.apiServer" -}}
{{- with .Values.apiServer -}}
{{- if .host -}}
- name: KUBERNETES_SERVICE_HOST
  value: {{ .host | quote }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ .port | toString | quote }}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
What the Go runtime reads, unless extraEnv has it: (list values environment). It collects garbage in time for nine
tenths of the memory limit: below them a program is slower, above the limit the kernel kills it. A limit in a unit that
is not known here sets none.
*/}}
{{- define "stayput.goRuntime" -}}
{{- $values := index . 0 -}}
{{- $env := index . 1 -}}
{{- $limit := dig "limits" "memory" "" ($values.resources | default dict) | toString -}}
{{- $unit := regexFind "[A-Za-z]*$" $limit -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- with and (hasKey $units $unit) (int64 (mulf 0.9 (float64 (trimSuffix $unit $limit)) (get $units $unit))) -}}
{{- $env = set $env "GOMEMLIMIT" . -}}
{{- end -}}
{{- range $values.extraEnv -}}
{{- $env = omit $env .name -}}
{{- end -}}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end -}}
{{- end }}

{{/* HOST:PORT, for an IPv6 address as well: (list host port). */}}
{{- define "stayput.hostPort" -}}
{{- $host := index . 0 -}}
{{ if contains ":" $host }}[{{ $host }}]{{ else }}{{ $host }}{{ end }}:{{ index . 1 }}
{{- end }}

{{/* Where the agent listens. Brackets are right around an IPv4 address, too: kubelet fills in either family. */}}
{{- define "stayput.agentListen" -}}
{{- if .bindAddress }}{{ include "stayput.hostPort" (list .bindAddress .port) }}{{ else }}[$(HOST_IP)]:{{ .port }}{{ end }}
{{- end }}

{{/* kubelet asks the node's address, unless the agent listens on another one only. */}}
{{- define "stayput.probeHost" -}}
{{- if not (has . (list "" "0.0.0.0" "::")) -}}
host: {{ . | quote }}
{{- end -}}
{{- end }}

{{/* What the agent needs of the node, as YAML: what is set, and else what the platform has. */}}
{{- define "stayput.node" -}}
{{- $all := .Files.Get "files/platforms.yaml" | fromYaml -}}
{{- $of := merge (dict) (get $all (.Values.platform | default "default")) $all.default -}}
{{- with .Values.agent -}}
criSocket: {{ .runtime.criSocket | default $of.criSocket }}
confDir: {{ .cni.confDir | default $of.confDir }}
binDir: {{ .cni.binDir | default $of.binDir }}
dataDirs: {{ concat .cni.dataDirs $of.dataDirs | toJson }}
{{- end -}}
{{- end }}

{{/*
The directories of the node that the agent needs, as a YAML list. One that is needed for two reasons is mounted once.
New namespaces are mounts that appear after the agent has started: HostToContainer brings them in.
*/}}
{{- define "stayput.agentDirs" -}}
{{- $a := .Values.agent -}}
{{- $node := include "stayput.node" . | fromYaml -}}
{{- $state := dict "name" "state" "path" $a.stateDir -}}
{{- /* Both also where it installs nothing, to take away at the end what an earlier installation put there. */ -}}
{{- $conf := dict "name" "cni-conf" "path" $node.confDir -}}
{{- $cache := dict "name" "cni-cache" "path" $a.cni.cacheDir -}}
{{- $bin := dict "name" "cni-bin" "path" $node.binDir -}}
{{- $all := list $state $conf $cache $bin -}}
{{- range $i, $dir := $node.dataDirs -}}
{{- $all = append $all (dict "name" (printf "cni-data-%d" $i) "path" $dir) -}}
{{- end -}}
{{- /* Leftover namespaces are removed there. */ -}}
{{- $all = append $all (dict "name" "run-netns" "path" "/run/netns" "propagation" "HostToContainer") -}}
{{- $all = append $all (dict "name" "var-run-netns" "path" "/var/run/netns" "propagation" "HostToContainer") -}}
{{- /* The directories, not the sockets: a runtime makes its sockets again when it starts. containerd's is that of its
state as well, below which it can be told to mount the namespaces. */ -}}
{{- $all = append $all (dict "name" "cri" "path" (dir $node.criSocket) "propagation" "HostToContainer" "readOnly" true) -}}
{{- if $a.runtime.nriSocket -}}
{{- $all = append $all (dict "name" "nri" "path" (dir $a.runtime.nriSocket) "propagation" "HostToContainer" "readOnly" true) -}}
{{- end -}}
{{- $seen := dict -}}
{{- $once := list -}}
{{- range $all -}}
{{- if not (hasKey $seen .path) -}}
{{- $_ := set $seen .path true -}}
{{- $once = append $once . -}}
{{- end -}}
{{- end -}}
{{ toYaml $once }}
{{- end }}

{{/* Of a strategy of another type than RollingUpdate the API server wants no details. */}}
{{- define "stayput.strategy" -}}
{{- toYaml (ternary . (pick . "type") (eq .type "RollingUpdate")) }}
{{- end }}

{{/*
Whether the definition of PersistentPodState is ours to install. It is OpenKruise's by origin: where another program has
it in the cluster, it is left alone. Helm deletes at an upgrade what the last revision had and the new one has not,
with every object of the kind: a definition that was ours and was taken over must be safe from that first.

Programs that render without looking into the cluster, such as Argo CD, hand in its kinds: where there are CloneSets
there is OpenKruise. PersistentPodStates say nothing, they may be ours.
*/}}
{{- define "stayput.persistentPodState" -}}
{{- if .Values.crds.install -}}
{{- $name := "persistentpodstates.apps.kruise.io" -}}
{{- $there := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name -}}
{{- if not $there -}}
{{- if not (.Capabilities.APIVersions.Has "apps.kruise.io/v1alpha1/CloneSet") }}true{{ end -}}
{{- else if eq "stayput" (dig "metadata" "labels" "app.kubernetes.io/part-of" "" $there) -}}
true
{{- else if ne "keep" (dig "metadata" "annotations" "helm.sh/resource-policy" "" $there) -}}
{{- $was := lookup "v1" "ConfigMap" .Release.Namespace "stayput-installation" | default dict -}}
{{- if eq "ours" (dig "data" "persistentPodState" "" $was) -}}
{{- fail (printf "the CustomResourceDefinition %s was Stayput's and now belongs to another program, probably OpenKruise. So that Helm does not delete it, run: kubectl annotate crd %s helm.sh/resource-policy=keep" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Spiderpool's annotations by which pods ask for addresses of pools, and namespaces for theirs, as CEL strings. */}}
{{- define "stayput.spiderpoolOfPods" -}}
'ipam.spidernet.io/ippool', 'ipam.spidernet.io/ippools', 'ipam.spidernet.io/subnet', 'ipam.spidernet.io/subnets'
{{- end }}

{{- define "stayput.spiderpoolOfNamespaces" -}}
'ipam.spidernet.io/default-ipv4-ippool', 'ipam.spidernet.io/default-ipv6-ippool'
{{- end }}

{{/*
Whether the definition of SpiderIPPool is ours to install: where another program has it in the cluster, it is left alone.
Spiderpool's own chart leaves a definition alone that is there already. Programs that render without looking into the
cluster hand in its kinds: where there are SpiderEndpoints there is Spiderpool.
*/}}
{{- define "stayput.spiderIPPool" -}}
{{- if and .Values.crds.install .Values.pools.enabled .Values.pools.spiderpool -}}
{{- $there := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "spiderippools.spiderpool.spidernet.io" -}}
{{- if not $there -}}
{{- if not (.Capabilities.APIVersions.Has "spiderpool.spidernet.io/v2beta1/SpiderEndpoint") }}true{{ end -}}
{{- else if eq "stayput" (dig "metadata" "labels" "app.kubernetes.io/part-of" "" $there) -}}
true
{{- end -}}
{{- end -}}
{{- end }}

{{/* Values that contradict each other or the cluster. */}}
{{- define "stayput.validate" -}}
{{- if not .Values.agent.enabled -}}
{{- if and .Values.pools.enabled (not .Values.pools.calico) -}}
{{- fail "pools.enabled: pools need agents, but for those of mode Calico: expected agent.enabled or pools.calico to be true" -}}
{{- end -}}
{{- if lookup "apps/v1" "DaemonSet" .Release.Namespace "stayput-agent" -}}
{{- fail "agent.enabled: agents run, and they put their nodes back only at an uninstallation: uninstall the release first, then install it with agent.enabled=false" -}}
{{- end -}}
{{- end -}}
{{- end }}
