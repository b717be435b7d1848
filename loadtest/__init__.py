"""Load tests and benchmarks.

`client/` and `locustfile.py` send HTTP requests to a running service. `scenarios/` starts a service first. `inprocess/`
runs Kvasir's engine without a service. `peers/` compares Kvasir with other inference engines.
"""
