#!/usr/bin/env bash
# Checks monitoring/ with Prometheus' own tools, and then with Prometheus itself on a running service:
#
#     monitoring/check.sh http://127.0.0.1:8000
#
# Sends the service a few completions, scrapes it, and asks every question that the dashboard, the recording rules
# and the alerts ask. Exit code 1 when one cannot be asked, or has no answer though the service was used.
# Needs prometheus, promtool, curl and python3 (Debian: apt-get install prometheus curl python3).
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

# Waits up to a minute for a command to succeed.
await() {
    local deadline=$((SECONDS + 60))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || return 1
        sleep 0.5
    done
}

echo "== configuration, rules, and what makes each alert fire"
promtool check config "$here/prometheus.yml"
promtool test rules "$here"/rule_tests/*.yml

echo "== the exposition"
# Left out are the names that are vLLM's: promtool rightly dislikes their colons, and `_total` on a histogram.
curl --fail --silent --show-error "$service/metrics" | grep --invert-match 'vllm:\|llm_iteration_tokens_total' |
    promtool check metrics

echo "== Prometheus on $service"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
ln -s "$here/rules" "$scratch/rules"
# The same configuration, in a hurry.
sed -e "s/kvasir:8000/${service#http://}/" -e 's/_interval: .*/_interval: 1s/' -e 's/_timeout: .*/_timeout: 1s/' \
    "$here/prometheus.yml" >"$scratch/prometheus.yml"
prometheus --config.file="$scratch/prometheus.yml" --storage.tsdb.path="$scratch/data" \
    --web.listen-address="127.0.0.1:$port" --log.level=error &
pid=$!
url=http://127.0.0.1:$port

# The value of an instant query; fails when it cannot be asked, prints nothing when it has no answer.
ask() {
    promtool query instant "$url" "$1"
}
answers() {
    [[ -n $(ask "$1") ]]
}
await answers 'up{job="kvasir"} == 1' || fail "Prometheus does not scrape $service"

for number in 1 2 3 4 5; do
    curl --fail --silent --show-error --output /dev/null --header 'content-type: application/json' \
        --data "{\"prompt\": \"Once upon a time\", \"max_tokens\": 8, \"ignore_eos\": true, \"seed\": $number}" \
        "$service/v1/completions" || fail "$service refuses a completion"
    sleep 1 # a rate needs an increase between two scrapes
done
await answers 'model:llm_e2e_request_latency_seconds:quantile5m{quantile="0.99"} > 0' ||
    fail "completions leave no trace in the recorded latencies"

# Every question, one a line, the dashboard's variables filled in: whether it must be answered, then the expression.
python3 - "$here" >"$scratch/questions" <<'PYTHON'
import json, re, sys
from pathlib import Path

here = Path(sys.argv[1])
dashboard = json.loads((here / "grafana/dashboards/kvasir.json").read_text())
for panel in dashboard["panels"]:
    for target in panel.get("targets", []):
        expr = target["expr"].replace('model_name="$model_name"', 'model_name=~".+"')
        print("answer", expr.replace("$__rate_interval", "1m"))
for name in re.findall(r"record: (\S+)", (here / "rules/recording.yml").read_text()):
    print("answer", name)
print("ask", "ALERTS")
PYTHON
count=0
while read -r kind expr; do
    answer=$(ask "$expr") || fail "cannot be asked: $expr"
    [[ $kind == ask || -n $answer ]] || fail "no answer: $expr"
    count=$((count + 1))
done <"$scratch/questions"
echo "  $count questions asked and answered"

firing=$(ask 'ALERTS{alertstate="firing", severity="critical"}')
[[ -z $firing ]] || fail "an idle service raises $firing"
unhealthy=$(curl --fail --silent "$url/api/v1/rules" |
    python3 -c 'import json, sys; groups = json.load(sys.stdin)["data"]["groups"]
print(*(rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"))')
[[ -z $unhealthy ]] || fail "rules that cannot be evaluated: $unhealthy"
echo "all good"
