#!/usr/bin/env bash
# Check monitoring/ with promtool, and with a Prometheus server on a running service:
#
#     monitoring/check.sh http://127.0.0.1:8000
#
# Sends the service five completions, scrapes it, and runs every query of the dashboards, the recording rules and the
# alerts. Exits with 1 if a query is invalid, if a query that should have data returns no samples, or if a critical
# alert fires. Needs prometheus, promtool, curl and python3 (Debian: apt-get install prometheus curl python3).
set -euo pipefail

if [[ $# -ne 1 || $1 != http://* ]]; then
    echo "usage: $0 http://HOST:PORT" >&2
    exit 2
fi
service=${1%/}
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
pid=

clean_up() {
    if [[ -n $pid ]]; then kill "$pid" 2>/dev/null && wait "$pid" || true; fi
    rm -rf "$scratch"
}
trap clean_up EXIT

fail() {
    echo "check.sh: $*" >&2
    exit 1
}

# Retry a command for up to a minute until it succeeds.
await() {
    local deadline=$((SECONDS + 60))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || return 1
        sleep 0.5
    done
}

echo "== configuration, rules and rule tests"
promtool check config "$here/prometheus.yml"
promtool test rules "$here"/rule_tests/*.yml

echo "== format of /metrics"
# Exclude vLLM's metric names: promtool rejects their colons, which are reserved for recording rules, and `_total` on a
# histogram.
curl --fail --silent --show-error "$service/metrics" | grep --invert-match 'vllm:\|llm_iteration_tokens_total' |
    promtool check metrics

echo "== Prometheus on $service"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
ln -s "$here/rules" "$scratch/rules"
# The same configuration without Alertmanager, and with intervals of 1 s, so that the check takes less time.
sed -e '/^alerting:/,/^$/d' -e "s/kvasir:8000/${service#http://}/" -e 's/_interval: .*/_interval: 1s/' -e 's/_timeout: .*/_timeout: 1s/' \
    "$here/prometheus.yml" >"$scratch/prometheus.yml"
prometheus --config.file="$scratch/prometheus.yml" --storage.tsdb.path="$scratch/data" \
    --web.listen-address="127.0.0.1:$port" --log.level=error &
pid=$!
url=http://127.0.0.1:$port

# Print the samples of an instant query. Fails if the query is invalid; prints nothing if it has no samples.
run_query() {
    promtool query instant "$url" "$1"
}
has_samples() {
    [[ -n $(run_query "$1") ]]
}
await has_samples 'up{job="kvasir"} == 1' || fail "Prometheus does not scrape $service"

for number in 1 2 3 4 5; do
    curl --fail --silent --show-error --output /dev/null --header 'content-type: application/json' \
        --data "{\"prompt\": \"Once upon a time\", \"max_tokens\": 8, \"ignore_eos\": true, \"seed\": $number}" \
        "$service/v1/completions" || fail "$service did not return a completion; see the error above"
    sleep 1 # a rate needs an increase between two scrapes
done
await has_samples 'model:llm_e2e_request_latency_seconds:quantile5m{quantile="0.99"} > 0' ||
    fail "the recorded latencies have no samples after five completions"

# One query per line, with the dashboards' variables filled in: first `required` if the query must return samples, else
# `optional`, as for those with a comparison; then the expression.
python3 - "$here" >"$scratch/queries" <<'PYTHON'
import json, re, sys
from pathlib import Path

here = Path(sys.argv[1])
dashboards = [json.loads(path.read_text()) for path in (here / "grafana/dashboards").glob("*.json")]
for panel in (panel for dashboard in dashboards for panel in dashboard["panels"]):
    for target in panel.get("targets", []):
        expr = target["expr"].replace('model_name="$model_name"', 'model_name=~".+"').replace("$model_name", ".+")
        kind = "optional" if re.search(" (>|==) ", expr) or "ALERTS" in expr else "required"
        print(kind, expr.replace("$__rate_interval", "1m"))
for name in re.findall(r"record: (\S+)", (here / "rules/recording.yml").read_text()):
    print("required", name)
print("optional", "ALERTS")
PYTHON
count=0
while read -r kind expr; do
    samples=$(run_query "$expr") || fail "invalid query: $expr"
    [[ $kind == optional || -n $samples ]] || fail "query returns no samples: $expr"
    count=$((count + 1))
done <"$scratch/queries"
echo "  $count queries succeeded"

firing=$(run_query 'ALERTS{alertstate="firing", severity="critical"}')
[[ -z $firing ]] || fail "critical alerts fire although the service is healthy: $firing"
unhealthy=$(curl --fail --silent "$url/api/v1/rules" |
    python3 -c 'import json, sys; groups = json.load(sys.stdin)["data"]["groups"]
print(*(rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"))')
[[ -z $unhealthy ]] || fail "Prometheus cannot evaluate the rules $unhealthy"
echo "all checks passed"
