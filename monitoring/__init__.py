"""Monitoring of the service: Prometheus configuration, rules and alerts, and the Grafana dashboard."""
