"""Watching the service: what Prometheus scrapes and computes, when it alerts, what Grafana shows.

prometheus.yml   whom to scrape
rules/           recording rules and alerts; rule_tests/ shows when each alert fires
grafana/         data source and dashboard, provisioned
dashboard        grafana/dashboards/kvasir.json, written by `python -m monitoring.dashboard`
metrics_page     docs/metrics.md, written by `python -m monitoring.metrics_page`
check.sh         all of it, by promtool and a real Prometheus on a running service
"""
