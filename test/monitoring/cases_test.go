package monitoring

// alertCase is an alert's two histories, one value a minute in promtool's notation, the time of its evaluation, and the
// text expected then.
type alertCase struct {
	fires, quiet []string
	after        string
	labels       map[string]string // besides the severity
	says         string            // empty: the rule's own text, the same for all instances
}

func on(more ...string) map[string]string {
	labels := map[string]string{"instance": "node-1"}
	for i := 0; i < len(more); i += 2 {
		labels[more[i]] = more[i+1]
	}
	return labels
}

const pods = `instance="node-1",network="pods",range="10.244.1.1-10.244.1.254"`

var cases = map[string]alertCase{
	"StayputAgentDown": {
		fires: []string{`up{instance="node-1",job="stayput-agent"} = 1x2 0x20`},
		quiet: []string{
			`up{instance="node-1",job="stayput-agent"} = 1x2 0x5 1x20`, `up{instance="node-1",job="kubelet"} = 0x20`,
		},
		after: "14m", labels: on("job", "stayput-agent"),
		says: "stayput-agent on node-1 has not answered for 10 minutes. Pods start and stop as before and keep their " +
			"addresses, but expired addresses are not freed, leaks are not reclaimed, and RetainedIPs of this node " +
			"are out of date: pods may come home late.",
	},
	"StayputAgentsAbsent": {
		fires: []string{`stayput_build_info{instance="controller-1",component="controller"} = 1x20`},
		quiet: []string{`stayput_build_info{instance="node-1",component="agent",version="v1.0.0"} = 1x20`},
		after: "12m", labels: map[string]string{"component": "agent"},
	},
	"StayputNRIDisconnected": {
		fires: []string{`stayput_agent_nri_connected{instance="node-1"} = 0x20`},
		quiet: []string{`stayput_agent_nri_connected{instance="node-1"} = 0x5 1x20`},
		after: "12m", labels: on(),
		says: "stayput-agent on node-1 has had no NRI connection for 10 minutes. Pods whose annotations do not reach " +
			"the plugin through the CNI configuration are promised their addresses only once the runtime lists them, " +
			"some tenths of a second after their start.",
	},
	"StayputCRIUnreachable": {
		fires: []string{`stayput_agent_cri_up{instance="node-1"} = 0x20`},
		quiet: []string{`stayput_agent_cri_up{instance="node-1"} = 0x10 1x20`},
		after: "17m", labels: on(),
		says: "The calls of stayput-agent on node-1 to its container runtime have failed for 15 minutes. Until they " +
			"succeed, no leaked address is reclaimed on this node.",
	},
	"StayputAPIServerUnreachable": {
		fires: []string{`stayput_agent_api_up{instance="node-1"} = 0x20`},
		quiet: []string{`stayput_agent_api_up{instance="node-1"} = 0x10 1x20`},
		after: "17m", labels: on(),
		says: "stayput-agent on node-1 has had no connection to the API server for 15 minutes. Its RetainedIPs are out " +
			"of date: pods from this node may be placed elsewhere, and releases are not carried out.",
	},
	"StayputAPIWritesFail": {
		fires: []string{`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="forbidden"} = 0+1x40`},
		quiet: []string{
			`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="forbidden"} = 0x10 3x30`,
			`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="ok"} = 0+9x40`,
		},
		after: "32m", labels: on("result", "forbidden"),
		says: "15 writes of RetainedIPs by stayput-agent on node-1 ended as forbidden within 15 minutes.",
	},
	"StayputAPIWriteConflicts": {
		fires: []string{`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="conflict"} = 0+4x40`},
		quiet: []string{`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="conflict"} = 0+1x40`},
		after: "32m", labels: on(),
		says: "60 writes of RetainedIPs by stayput-agent on node-1 conflicted with another writer's within 15 minutes.",
	},
	"StayputCNIConfigurationNotOurs": {
		fires: []string{`stayput_agent_cni_config{instance="node-1",state="shadowed"} = 1x20`,
			`stayput_agent_cni_config{instance="node-1",state="active"} = 0x20`},
		quiet: []string{
			`stayput_agent_cni_config{instance="node-1",state="shadowed"} = 1x5 0x20`,
			`stayput_agent_cni_config{instance="node-1",state="active"} = 0x5 1x20`,
			`stayput_agent_cni_config{instance="node-2",state="by-hand"} = 1x20`,
			`stayput_agent_cni_config{instance="node-3",state="multus"} = 1x20`, // whose delegate is unknown
			`stayput_agent_cni_config{instance="node-4",state="held"} = 1x20`,
			`stayput_agent_cni_config{instance="node-5",state="none"} = 1x20`, // a node waiting for its network
		},
		after: "17m", labels: on("state", "shadowed"),
		says: "The CNI configuration of node-1 has been in the state shadowed for 15 minutes. New pods of this node may " +
			"get no promise of their address.",
	},
	"StayputCNIConfigurationErrors": {
		fires: []string{`stayput_agent_errors_total{instance="node-1",operation="cni_config"} = 0+1x40`},
		quiet: []string{`stayput_agent_errors_total{instance="node-1",operation="cni_config"} = 0x2 1x40`},
		after: "25m", labels: on(),
		says: "For 15 minutes, stayput-agent on node-1 has failed to read or write the CNI configuration or the " +
			"plugin's binary.",
	},
	"StayputLedgerErrors": {
		fires: errors("0+1x40"),
		quiet: errors("0x2 1x40"), // once: the disk was briefly full
		after: "25m", labels: on(),
		says: "Reads or writes of the records in /var/lib/stayput and in the network directories have failed on node-1 " +
			"for 15 minutes: the disk is full, read-only or broken. Acknowledged promises stand; new ones may fail.",
	},
	"StayputReconciliationFails": {
		fires: []string{`stayput_agent_errors_total{instance="node-1",operation="reconcile"} = 0 0 0+0.2x80`},
		quiet: []string{`stayput_agent_errors_total{instance="node-1",operation="reconcile"} = 0x2 1x80`},
		after: "65m", labels: on(),
		says: "6 reconciliations of stayput-agent on node-1 failed within 30 minutes. Leaked addresses stay until one " +
			"succeeds.",
	},

	"StayputRestoreMisses": {
		fires: []string{`stayput_restore_misses_total{instance="node-1",network="pods",reason="range_changed"} = 0x10 2x10`},
		quiet: []string{
			`stayput_restore_misses_total{instance="node-1",network="pods",reason="range_changed"} = 7x20`,
			`stayput_restore_misses_total{instance="node-1",network="pods",reason="allocate_new"} = 0+1x20`, // as requested
		},
		after: "14m", labels: on("network", "pods", "reason", "range_changed"),
		says: "2 pods on node-1 with a promised address of network pods got another one within 15 minutes: " +
			"range_changed.",
	},
	"StayputRetentionsRefused": {
		fires: []string{`stayput_retentions_refused_total{instance="node-1",network="pods"} = 0x10 3x10`},
		quiet: []string{`stayput_retentions_refused_total{instance="node-1",network="pods"} = 3x20`},
		after: "14m", labels: on("network", "pods"),
		says: "3 pods on node-1 started with an ordinary address within 15 minutes: the share of network pods that may " +
			"be promised is used up.",
	},
	"StayputPromisesNearLimit": {
		fires: []string{`stayput_range_promised_addresses{` + pods + `} = 120x20`,
			`stayput_range_promisable_addresses{` + pods + `} = 125x20`},
		quiet: []string{`stayput_range_promised_addresses{` + pods + `} = 100x20`,
			`stayput_range_promisable_addresses{` + pods + `} = 125x20`},
		after: "17m", labels: on("network", "pods", "range", "10.244.1.1-10.244.1.254"),
		says: "96% of the promises that range 10.244.1.1-10.244.1.254 of network pods on node-1 allows are made. Beyond " +
			"the limit pods start with ordinary addresses.",
	},
	"StayputRangeNearlyFull": {
		fires: []string{
			`stayput_range_taken_addresses{` + pods + `} = 240x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
		},
		quiet: []string{
			`stayput_range_taken_addresses{` + pods + `} = 240x5 200x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
		},
		after: "17m", labels: on("network", "pods", "range", "10.244.1.1-10.244.1.254"),
		says: "96% of range 10.244.1.1-10.244.1.254 of network pods on node-1 is bound or retained.",
	},
	"StayputRangeFull": {
		fires: []string{
			`stayput_range_taken_addresses{` + pods + `} = 250x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
		},
		quiet: []string{
			`stayput_range_taken_addresses{` + pods + `} = 249x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
		},
		after: "4m", labels: on("network", "pods", "range", "10.244.1.1-10.244.1.254"),
		says: "Every address of range 10.244.1.1-10.244.1.254 of network pods on node-1 is bound or retained. New pods " +
			"cannot start on this node.",
	},
	"StayputExpiryOverdue": {
		fires: []string{`stayput_next_expiry_timestamp_seconds{instance="node-1",network="pods"} = 60x30`},
		quiet: []string{`stayput_next_expiry_timestamp_seconds{instance="node-1",network="pods"} = 60x2 1200x30`},
		after: "20m", labels: on("network", "pods"),
		says: "The retention of an address of network pods on node-1 expired 19m 0s ago, and the address is not free.",
	},
	"StayputAddressesLeaked": {
		fires: []string{`stayput_addresses_reclaimed_total{instance="node-1",network="pods"} = 0x10 2x10`},
		quiet: []string{`stayput_addresses_reclaimed_total{instance="node-1",network="pods"} = 2x20`},
		after: "14m", labels: on("network", "pods"),
		says: "2 addresses of network pods on node-1 belonged to sandboxes that the runtime had not listed for the " +
			"grace period. They are free again.",
	},
	"StayputLeakSuspectsStay": {
		fires: []string{`stayput_agent_leak_suspects_held{instance="node-1"} = 2x80`},
		quiet: []string{`stayput_agent_leak_suspects_held{instance="node-1"} = 2x30 0x50`,
			`stayput_agent_leak_suspects{instance="node-1"} = 5x80`},
		after: "65m", labels: on(),
		says: "2 attachments on node-1 hold an address, are unknown to the runtime, and cannot be proven dead.",
	},
	"StayputAddressNotConfigured": {
		fires: []string{`stayput_verify_failures_total{instance="node-1"} = 0x10 1x10`},
		quiet: []string{`stayput_verify_failures_total{instance="node-1"} = 1x20`},
		after: "14m", labels: on(),
		says: "stayput-agent on node-1 found 1 pods within 15 minutes whose network namespace lacks an address that is " +
			"bound to them.",
	},
	"StayputInvalidAnnotations": {
		fires: []string{`stayput_invalid_annotations_total{instance="node-1"} = 0x10 1x10`},
		quiet: []string{`stayput_invalid_annotations_total{instance="node-1"} = 1x20`},
		after: "14m", labels: on(),
		says: "1 pods with invalid stayput.io annotations were seen on node-1 within 15 minutes. Their addresses are " +
			"not retained.",
	},
	"StayputPluginFails": {
		fires: []string{`stayput_plugin_duration_seconds_count{instance="node-1",command="add",result="error"} = 0+1x40`},
		quiet: []string{
			`stayput_plugin_duration_seconds_count{instance="node-1",command="add",result="error"} = 0x10 2x30`,
			// kubelet retries
			`stayput_plugin_duration_seconds_count{instance="node-1",command="add",result="in_use"} = 0+5x40`,
		},
		after: "22m", labels: on("command", "add"),
		says: "15 add calls of the plugin on node-1 failed within 15 minutes.",
	},
	"StayputPluginSlow": {
		fires: durations("ordinary", "0+1x60", "0+10x60", "0+10x60"),
		quiet: append(durations("ordinary", "0+10x60", "0+10x60", "0+10x60"),
			durations("in_use", "0x60", "0x60", "0+10x60")...),
		after: "40m", labels: on("command", "add"),
		says: "One in ten add calls of the plugin on node-1 takes longer than 2.233s: the disk is slow, or another " +
			"process holds the network's lock.",
	},

	"StayputNoControllerLeads": {
		fires: []string{`leader_election_master_status{instance="controller-1",name="stayput-controller"} = 0x20`},
		quiet: []string{`stayput_controller_gated_pods{instance="controller-1",waiting="false"} = 0x20`},
		after: "4m",
	},
	"StayputControllerDown": {
		fires: []string{`up{instance="controller-1",job="stayput-controller"} = 0x20`},
		quiet: []string{`up{instance="controller-1",job="stayput-controller"} = 0x5 1x20`},
		after: "12m", labels: map[string]string{"instance": "controller-1", "job": "stayput-controller"},
		says: "stayput-controller controller-1 has not answered for 10 minutes. If it is the only replica, nothing " +
			"takes over.",
	},
	"StayputGateWebhookNotReady": {
		fires: []string{
			`stayput_controller_gate_webhook_ready{instance="controller-1"} = 0x20`,
			`stayput_controller_gate_webhook_ready{instance="controller-2"} = 0x20`,
		},
		quiet: []string{
			`stayput_controller_gate_webhook_ready{instance="controller-1"} = 0x20`,
			`stayput_controller_gate_webhook_ready{instance="controller-2"} = 1x20`,
		},
		after: "7m",
		says: "Before Kubernetes 1.36 a webhook in the controllers gates pods, and for 5 minutes no controller has had a " +
			"certificate for it that the API server trusts. New pods start ungated: they can land anywhere, with another " +
			"address.",
	},
	"StayputPodsGatedTooLong": {
		fires: []string{`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="false"} = 0+60x20`},
		quiet: []string{
			`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="false"} = 3x20`,
			`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="true"} = 0+60x20`,
		},
		after: "6m",
		says:  "A pod has been gated for 6m 0s without a decision.",
	},
	"StayputPodsWaitForHome": {
		fires: []string{`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="true"} = 0+60x90`},
		quiet: []string{
			`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="true"} = 0+60x50 0x40`,
		},
		after: "70m",
		says: "A pod has been gated for 1h 10m 0s: the node that retains its address cannot take it, and its home-wait " +
			"is not over.",
	},
	"StayputHomesGivenUp": {
		fires: []string{`stayput_controller_placements_total{instance="controller-1",outcome="elsewhere"} = 0x10 2x20`},
		quiet: []string{`stayput_controller_placements_total{instance="controller-1",outcome="elsewhere"} = 2x30`,
			`stayput_controller_placements_total{instance="controller-1",outcome="home"} = 0+1x30`},
		after: "14m", labels: map[string]string{"outcome": "elsewhere"},
		says: "2 pods went elsewhere within 30 minutes because their home could not take them in time (elsewhere).",
	},
	"StayputControllerErrors": {
		fires: []string{placementErrors + `0+2x40`},
		quiet: []string{
			placementErrors + `0x5 8x40`,
			`controller_runtime_reconcile_errors_total{instance="other",job="other",controller="placement"} = 0+2x40`,
		},
		after: "32m", labels: map[string]string{"controller": "placement"},
		says: "30 reconciliations by placement of stayput-controller failed within 15 minutes.",
	},
	"StayputPersistentPodStatesTroubled": {
		fires: []string{`stayput_controller_persistent_pod_states{instance="controller-1",condition="Conflict"} = 1x20`},
		quiet: []string{`stayput_controller_persistent_pod_states{instance="controller-1",condition="Conflict"} = 0x20`,
			`stayput_controller_persistent_pod_states{instance="controller-1",condition="none"} = 4x20`},
		after: "17m", labels: map[string]string{"condition": "Conflict"},
		says: "1 PersistentPodStates have the condition Conflict.",
	},
	"StayputVersionsDiffer": {
		fires: []string{`stayput_build_info{instance="node-1",component="agent",version="v1.0.0"} = 1x80`,
			`stayput_build_info{instance="node-2",component="agent",version="v1.1.0"} = 1x80`},
		quiet: []string{`stayput_build_info{instance="node-1",component="agent",version="v1.1.0"} = 1x80`,
			`stayput_build_info{instance="controller-1",component="controller",version="v1.1.0"} = 1x80`},
		after: "65m",
		says:  "2 versions of stayput have been running for an hour: a rollout is stuck or incomplete.",
	},

	"StayputPoolNearlyFull": {
		fires: []string{`stayput_controller_pool_used_addresses{instance="controller-1",pool="blue"} = 96x20`,
			`stayput_controller_pool_addresses{instance="controller-1",pool="blue"} = 100x20`},
		quiet: []string{`stayput_controller_pool_used_addresses{instance="controller-1",pool="blue"} = 90x20`,
			`stayput_controller_pool_addresses{instance="controller-1",pool="blue"} = 100x20`},
		after: "17m", labels: map[string]string{"pool": "blue"},
		says: "96% of the addresses of pool blue are in use or kept.",
	},
	"StayputPoolExhausted": {
		fires: []string{`stayput_controller_pool_waiting_pods{instance="controller-1",pool="blue"} = 3x20`},
		quiet: []string{`stayput_controller_pool_waiting_pods{instance="controller-1",pool="blue"} = 3x3 0x20`},
		after: "7m", labels: map[string]string{"pool": "blue"},
		says: "3 pods have waited for a free address of pool blue for 5 minutes.",
	},
	"StayputPodsWaitForAddress": {
		fires: []string{gatedAge + `waiting="address"} = 0+60x30`},
		quiet: []string{gatedAge + `waiting="address"} = 0+60x10 0x20`, gatedAge + `waiting="false"} = 0+60x30`},
		after: "20m",
		says:  "A pod has been gated for 20m 0s: it waits for an address of a pool. Its Event WaitingForAddress says why.",
	},
	"StayputAddressesHeld": {
		fires: []string{heldAge + `operator="true"} = 0+60x30`, heldAge + `operator="false"} = 0x30`},
		quiet: []string{heldAge + `operator="true"} = 0+60x9 0x20`, heldAge + `operator="false"} = 0+60x9 0x20`},
		after: "20m", labels: map[string]string{"operator": "true"},
		says: "For 20m 0s nothing has proved that a deleted pod is gone from its node, so that no pod gets its address. " +
			"That only an operator can end it: true.",
	},
	"StayputAddressesQuarantined": {
		fires: []string{`stayput_controller_pool_quarantined_addresses{instance="controller-1"} = 2x20`},
		quiet: []string{`stayput_controller_pool_quarantined_addresses{instance="controller-1"} = 2x5 0x20`},
		after: "12m",
		says: "2 addresses of pools have been in quarantine for 10 minutes: two pods use the same address, or another " +
			"machine on the link uses it.",
	},
	"StayputPoolsRecalling": {
		fires: []string{`stayput_controller_pool_recalling{instance="controller-1"} = 1x20`},
		quiet: []string{`stayput_controller_pool_recalling{instance="controller-1"} = 1x3 0x20`},
		after: "7m",
	},
	"StayputPoolAnswerOwed": {
		fires: []string{`stayput_agent_pool_answer_owed{instance="node-1"} = 1x20`},
		quiet: []string{`stayput_agent_pool_answer_owed{instance="node-1"} = 1x3 0x20`},
		after: "7m", labels: on(),
		says: "For 5 minutes, stayput-agent on node-1 has not answered what all nodes are asked about addresses of pools. " +
			"Pods may wait for it.",
	},
	"StayputPodEndsUnproven": {
		fires: []string{`stayput_agent_pool_oldest_unproven_pod_age_seconds{instance="node-1"} = 0+60x30`},
		quiet: []string{`stayput_agent_pool_oldest_unproven_pod_age_seconds{instance="node-1"} = 0+60x9 0x20`,
			`stayput_agent_pool_unproven_pods{instance="node-1"} = 7x30`},
		after: "20m", labels: on(),
		says: "20m 0s after a pod has ended, stayput-agent on node-1 cannot confirm that nothing of it is left. No pod " +
			"gets its address.",
	},
	"StayputPoolWorkFails": {
		fires: []string{`stayput_agent_pool_failures_total{instance="node-1",part="pod"} = 0+1x40`},
		quiet: []string{`stayput_agent_pool_failures_total{instance="node-1",part="pod"} = 0x10 4x30`},
		after: "32m", labels: on("part", "pod"),
		says: "15 attempts of stayput-agent on node-1 failed within 15 minutes (pod). Pods with addresses of pools may not " +
			"start, and their addresses may not become free.",
	},
}

const (
	gatedAge = `stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",`
	heldAge  = `stayput_controller_pool_oldest_held_address_age_seconds{instance="controller-1",`
)

const placementErrors = `controller_runtime_reconcile_errors_total{instance="controller-1",job="stayput-controller",` +
	`controller="placement"} = `

// errors returns the error counters of all operations on the records; values are those of one.
func errors(values string) []string {
	all := []string{`stayput_agent_errors_total{instance="node-1",operation="policy"} = ` + values}
	for _, operation := range []string{"network", "expire", "release", "spool"} {
		all = append(all, `stayput_agent_errors_total{instance="node-1",operation="`+operation+`"} = 0x80`)
	}
	return all
}

// durations returns the buckets of an ADD histogram.
func durations(result string, tenth, second, all string) []string {
	series := `stayput_plugin_duration_seconds_bucket{instance="node-1",command="add",result="` + result + `",le="`
	return []string{series + `0.1"} = ` + tenth, series + `2.5"} = ` + second, series + `+Inf"} = ` + all}
}
