package monitoring

// alertCase is an alert's two histories, one value a minute in promtool's notation, the time of its evaluation, and the
// labels and the value, as its text has it, that it has then.
type alertCase struct {
	fires, quiet []string
	after        string
	labels       map[string]string // besides the severity
	value        string
	also         []string // alerts of which the cause is a part
}

func labels(pairs ...string) map[string]string {
	all := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		all[pairs[i]] = pairs[i+1]
	}
	return all
}

const pods = `instance="node-1",network="pods",range="10.244.1.1-10.244.1.254"`

var cases = map[string]alertCase{
	"StayputAgentDown": {
		fires: []string{`up{instance="node-1",job="stayput-agent"} = 1x2 0x20`},
		quiet: []string{
			`up{instance="node-1",job="stayput-agent"} = 1x2 0x5 1x20`, `up{instance="node-1",job="kubelet"} = 0x20`,
		},
		after: "20m", value: "1",
	},
	"StayputAgentsAbsent": {
		fires: []string{controllerBuild + ` = 1x20`, leads, agentBuild + ` = 1x2 stale`},
		quiet: []string{controllerBuild + ` = 1x20`, leads, agentBuild + ` = 1x20`},
		after: "15m",
	},
	"StayputNRIDisconnected": {
		fires: []string{`stayput_agent_nri_connected{instance="node-1"} = 0x20`},
		quiet: []string{`stayput_agent_nri_connected{instance="node-1"} = 0x5 1x20`},
		after: "12m", value: "1",
	},
	"StayputCRIUnreachable": {
		fires: []string{`stayput_agent_cri_up{instance="node-1"} = 0x20`},
		quiet: []string{`stayput_agent_cri_up{instance="node-1"} = 0x10 1x20`},
		after: "17m", value: "1",
	},
	"StayputAPIServerUnreachable": {
		fires: []string{`stayput_agent_api_up{instance="node-1"} = 0x20`},
		quiet: []string{`stayput_agent_api_up{instance="node-1"} = 0x10 1x20`},
		after: "17m", value: "1",
	},
	"StayputAPIWritesFail": {
		fires: []string{`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="forbidden"} = 0+1x40`},
		quiet: []string{
			`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="forbidden"} = 0x10 3x30`,
			`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="ok"} = 0+9x40`,
		},
		after: "32m", labels: labels("result", "forbidden"), value: "1",
	},
	"StayputAPIWriteConflicts": {
		fires: []string{`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="conflict"} = 0+4x40`},
		quiet: []string{`stayput_agent_api_writes_total{instance="node-1",verb="apply",result="conflict"} = 0+1x40`},
		after: "32m", value: "1",
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
		after: "17m", labels: labels("state", "shadowed"), value: "1",
	},
	"StayputChainedPluginMissing": {
		fires: []string{`stayput_agent_cni_config_incomplete{instance="node-1"} = 1x20`,
			`stayput_agent_cni_config{instance="node-1",state="active"} = 1x20`},
		quiet: []string{
			`stayput_agent_cni_config_incomplete{instance="node-1"} = 1x5 0 1x20`, // an upgrade of the mesh
			`stayput_agent_cni_config_incomplete{instance="node-2"} = 0x20`,
		},
		after: "17m", value: "1",
	},
	"StayputCNIConfigurationErrors": {
		fires: []string{`stayput_agent_errors_total{instance="node-1",operation="cni_config"} = 0+1x40`},
		quiet: []string{`stayput_agent_errors_total{instance="node-1",operation="cni_config"} = 0x2 1x40`},
		after: "25m", value: "1",
	},
	"StayputLedgerErrors": {
		fires: errors("0+1x40"),
		quiet: errors("0x2 1x40"), // once: the disk was briefly full
		after: "25m", value: "1",
	},
	"StayputReconciliationFails": {
		fires: []string{`stayput_agent_errors_total{instance="node-1",operation="reconcile"} = 0 0 0+0.2x80`},
		quiet: []string{
			`stayput_agent_errors_total{instance="node-1",operation="reconcile"} = 0x2 1x80`,
			// because of the runtime
			`stayput_agent_errors_total{instance="node-2",operation="reconcile"} = 0 0 0+0.2x80`,
			`stayput_agent_cri_up{instance="node-2"} = 0x80`,
		},
		after: "65m", value: "1",
	},

	"StayputRestoreMisses": {
		fires: []string{`stayput_restore_misses_total{instance="node-1",network="pods",reason="range_changed"} = 0x10 2x10`},
		quiet: []string{
			`stayput_restore_misses_total{instance="node-1",network="pods",reason="range_changed"} = 7x20`,
			`stayput_restore_misses_total{instance="node-1",network="pods",reason="allocate_new"} = 0+1x20`, // as requested
		},
		after: "14m", labels: labels("network", "pods", "reason", "range_changed"), value: "2",
	},
	"StayputRetentionsRefused": {
		fires: []string{`stayput_retentions_refused_total{instance="node-1",network="pods"} = 0x10 3x20`},
		quiet: []string{`stayput_retentions_refused_total{instance="node-1",network="pods"} = 3x20`},
		after: "18m", labels: labels("network", "pods"), value: "3",
	},
	"StayputPromisesNearLimit": {
		fires: []string{`stayput_range_promised_addresses{` + pods + `} = 120x20`,
			`stayput_range_promisable_addresses{` + pods + `} = 125x20`},
		quiet: []string{`stayput_range_promised_addresses{` + pods + `} = 100x20`,
			`stayput_range_promisable_addresses{` + pods + `} = 125x20`},
		after: "17m", labels: labels("network", "pods"), value: "1",
	},
	"StayputRangeNearlyFull": {
		fires: []string{
			`stayput_range_taken_addresses{` + pods + `} = 240x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
		},
		quiet: []string{
			`stayput_range_taken_addresses{` + pods + `} = 240x5 200x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
			`stayput_range_taken_addresses{instance="node-2",network="pods",range="a"} = 250x20`, // it is full
			`stayput_range_addresses{instance="node-2",network="pods",range="a"} = 250x20`,
		},
		after: "17m", labels: labels("network", "pods"), value: "1",
	},
	"StayputRangeFull": {
		fires: []string{
			`stayput_range_taken_addresses{` + pods + `} = 250x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
		},
		quiet: []string{
			`stayput_range_taken_addresses{` + pods + `} = 249x20`, `stayput_range_addresses{` + pods + `} = 250x20`,
		},
		after: "4m", labels: labels("network", "pods"), value: "1",
	},
	"StayputExpiryOverdue": {
		fires: []string{`stayput_next_expiry_timestamp_seconds{instance="node-1",network="pods"} = 60x30`},
		quiet: []string{`stayput_next_expiry_timestamp_seconds{instance="node-1",network="pods"} = 60x2 1200x30`},
		after: "20m", labels: labels("network", "pods"), value: "1",
	},
	"StayputAddressesLeaked": {
		fires: []string{`stayput_addresses_reclaimed_total{instance="node-1",network="pods"} = 0x10 2x20`},
		quiet: []string{`stayput_addresses_reclaimed_total{instance="node-1",network="pods"} = 2x20`},
		after: "18m", labels: labels("network", "pods"), value: "2",
	},
	"StayputLeakSuspectsStay": {
		fires: []string{`stayput_agent_leak_suspects_held{instance="node-1"} = 2x80`},
		quiet: []string{`stayput_agent_leak_suspects_held{instance="node-1"} = 2x30 0x50`,
			`stayput_agent_leak_suspects{instance="node-1"} = 5x80`},
		after: "65m", value: "2",
	},
	"StayputAddressNotConfigured": {
		fires: []string{`stayput_verify_failures_total{instance="node-1"} = 0x10 1x10`},
		quiet: []string{`stayput_verify_failures_total{instance="node-1"} = 1x20`},
		after: "14m", value: "1",
	},
	"StayputInvalidAnnotations": {
		fires: []string{`stayput_invalid_annotations_total{instance="node-1"} = 0x10 1x20`},
		quiet: []string{`stayput_invalid_annotations_total{instance="node-1"} = 1x20`},
		after: "18m", value: "1",
	},
	"StayputPluginFails": {
		fires: []string{`stayput_plugin_duration_seconds_count{instance="node-1",command="add",result="error"} = 0+1x40`},
		quiet: []string{
			`stayput_plugin_duration_seconds_count{instance="node-1",command="add",result="error"} = 0x10 2x30`,
			// kubelet retries
			`stayput_plugin_duration_seconds_count{instance="node-1",command="add",result="in_use"} = 0+5x40`,
		},
		after: "22m", labels: labels("command", "add"), value: "1",
	},
	"StayputPluginSlow": {
		fires: durations("ordinary", "0+1x60", "0+10x60", "0+10x60"),
		quiet: append(durations("ordinary", "0+10x60", "0+10x60", "0+10x60"),
			durations("in_use", "0x60", "0x60", "0+10x60")...),
		after: "40m", labels: labels("command", "add"), value: "1",
	},

	"StayputNoControllerLeads": {
		fires: []string{controllerBuild + ` = 1x2 stale`, agentBuild + ` = 1x20`},
		quiet: []string{controllerBuild + ` = 1x20`, leads},
		after: "6m",
	},
	"StayputControllerDown": {
		fires: []string{`up{instance="controller-1",job="stayput-controller"} = 0x20`},
		quiet: []string{`up{instance="controller-1",job="stayput-controller"} = 0x5 1x20`},
		after: "12m", value: "1",
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
	},
	"StayputPodsGatedTooLong": {
		fires: []string{`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="false"} = 0+60x20`},
		quiet: []string{
			`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="false"} = 3x20`,
			`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="true"} = 0+60x20`,
		},
		after: "6m", value: "6m 0s",
	},
	"StayputPodsWaitForHome": {
		fires: []string{`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="true"} = 0+60x90`},
		quiet: []string{
			`stayput_controller_oldest_gated_pod_age_seconds{instance="controller-1",waiting="true"} = 0+60x50 0x40`,
		},
		after: "70m", value: "1h 10m 0s",
	},
	"StayputHomesGivenUp": {
		fires: []string{`stayput_controller_placements_total{instance="controller-1",outcome="elsewhere"} = 0x10 2x20`},
		quiet: []string{`stayput_controller_placements_total{instance="controller-1",outcome="elsewhere"} = 2x30`,
			`stayput_controller_placements_total{instance="controller-1",outcome="home"} = 0+1x30`},
		after: "18m", labels: labels("outcome", "elsewhere"), value: "2",
	},
	"StayputControllerErrors": {
		fires: []string{placementErrors + `0+2x40`},
		quiet: []string{
			placementErrors + `0x5 8x40`,
			`controller_runtime_reconcile_errors_total{instance="other",job="other",controller="placement"} = 0+2x40`,
		},
		after: "32m", labels: labels("controller", "placement"), value: "30",
	},
	"StayputPersistentPodStatesTroubled": {
		fires: []string{`stayput_controller_persistent_pod_states{instance="controller-1",condition="Conflict"} = 1x20`},
		quiet: []string{`stayput_controller_persistent_pod_states{instance="controller-1",condition="Conflict"} = 0x20`,
			`stayput_controller_persistent_pod_states{instance="controller-1",condition="none"} = 4x20`},
		after: "17m", labels: labels("condition", "Conflict"), value: "1",
	},
	"StayputVersionsDiffer": {
		fires: []string{agentBuild + ` = 1x80`, leads,
			`stayput_build_info{instance="node-2",component="agent",version="v1.1.0"} = 1x80`},
		quiet: []string{agentBuild + ` = 1x80`, leads, controllerBuild + ` = 1x80`},
		after: "65m", value: "2",
	},

	"StayputErrorBudgetBurnsFast": {
		fires: []string{missed + `0+1x120`, restored + `0+9x120`},
		quiet: []string{
			missed + `0x60 2x60`, restored + `0x120`, // all, but few
			placed + `outcome="elsewhere"} = 0+1x120`, placed + `outcome="home"} = 0x120`,
			gate + `_bucket{waited="false",le="5"} = 0+90x120`, gate + `_count{waited="false"} = 0+100x120`,
			gate + `_bucket{waited="true",le="5"} = 0x120`, gate + `_count{waited="true"} = 0+100x120`,
		},
		after: "70m", labels: labels("slo", "restore"), value: "100.0",
		also: []string{"StayputRestoreMisses", "StayputErrorBudgetBurnsSlowly"},
	},
	"StayputErrorBudgetBurnsSlowly": {
		fires: []string{
			gate + `_bucket{waited="false",le="5"} = 0+92x120`, gate + `_count{waited="false"} = 0+100x120`,
		},
		quiet: []string{
			missed + `0x60 2x60`, restored + `0x120`,
			placed + `outcome="elsewhere"} = 0+5x120`, placed + `outcome="home"} = 0+995x120`,
			gate + `_bucket{waited="false",le="5"} = 0+995x120`, gate + `_count{waited="false"} = 0+1000x120`,
		},
		after: "70m", labels: labels("slo", "gate"), value: "8.0",
	},

	"StayputPoolNearlyFull": {
		fires: []string{`stayput_controller_pool_used_addresses{instance="controller-1",pool="blue"} = 96x20`,
			`stayput_controller_pool_addresses{instance="controller-1",pool="blue"} = 100x20`},
		quiet: []string{`stayput_controller_pool_used_addresses{instance="controller-1",pool="blue"} = 90x20`,
			`stayput_controller_pool_addresses{instance="controller-1",pool="blue"} = 100x20`},
		after: "17m", labels: labels("pool", "blue"), value: "96%",
	},
	"StayputPoolExhausted": {
		fires: []string{`stayput_controller_pool_waiting_pods{instance="controller-1",pool="blue"} = 3x20`},
		quiet: []string{`stayput_controller_pool_waiting_pods{instance="controller-1",pool="blue"} = 3x3 0x20`},
		after: "7m", labels: labels("pool", "blue"), value: "3",
	},
	"StayputPodsWaitForAddress": {
		fires: []string{gatedAge + `waiting="address"} = 0+60x30`},
		quiet: []string{gatedAge + `waiting="address"} = 0+60x10 0x20`, gatedAge + `waiting="false"} = 0+60x30`},
		after: "20m", value: "20m 0s",
	},
	"StayputAddressesHeld": {
		fires: []string{heldAge + `operator="true"} = 0+60x30`, heldAge + `operator="false"} = 0x30`},
		quiet: []string{heldAge + `operator="true"} = 0+60x9 0x20`, heldAge + `operator="false"} = 0+60x9 0x20`},
		after: "20m", labels: labels("operator", "true"), value: "20m 0s",
	},
	"StayputAddressConflict": {
		fires: []string{`stayput_controller_pool_conflicting_addresses{instance="controller-1"} = 2x20`},
		quiet: []string{`stayput_controller_pool_conflicting_addresses{instance="controller-1"} = 2x5 0x20`},
		after: "12m", value: "2",
	},
	"StayputPoolsRecalling": {
		fires: []string{`stayput_controller_pool_recalling{instance="controller-1"} = 1x20`},
		quiet: []string{`stayput_controller_pool_recalling{instance="controller-1"} = 1x3 0x20`},
		after: "7m",
	},
	"StayputPoolAnswerOwed": {
		fires: []string{`stayput_agent_pool_report_owed{instance="node-1"} = 1x20`},
		quiet: []string{`stayput_agent_pool_report_owed{instance="node-1"} = 1x3 0x20`},
		after: "7m", value: "1",
	},
	"StayputPodEndsUnproven": {
		fires: []string{`stayput_agent_pool_oldest_unproven_pod_age_seconds{instance="node-1"} = 0+60x30`},
		quiet: []string{`stayput_agent_pool_oldest_unproven_pod_age_seconds{instance="node-1"} = 0+60x9 0x20`,
			`stayput_agent_pool_unproven_pods{instance="node-1"} = 7x30`},
		after: "20m", value: "1",
	},
	"StayputPoolWorkFails": {
		fires: []string{`stayput_agent_pool_failures_total{instance="node-1",part="pod"} = 0+1x40`},
		quiet: []string{
			`stayput_agent_pool_failures_total{instance="node-1",part="pod"} = 0x10 4x30`,
			// because of the API server
			`stayput_agent_pool_failures_total{instance="node-2",part="watch"} = 0+1x40`,
			`stayput_agent_api_up{instance="node-2"} = 0x40`,
		},
		after: "32m", labels: labels("part", "pod"), value: "1",
	},
}

const (
	agentBuild      = `stayput_build_info{instance="node-1",component="agent",version="v1.0.0"}`
	controllerBuild = `stayput_build_info{instance="controller-1",component="controller",version="v1.0.0"}`
	// leads is a controller that leads.
	leads    = `stayput_controller_gated_pods{instance="controller-1",waiting="false"} = 0x80`
	missed   = `stayput_restore_misses_total{instance="node-1",network="pods",reason="range_changed"} = `
	restored = `stayput_restores_total{instance="node-1",network="pods"} = `
	placed   = `stayput_controller_placements_total{instance="controller-1",`
	gate     = `stayput_controller_gate_duration_seconds`
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
