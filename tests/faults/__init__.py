"""Fault injection into a real server, whose responses are compared with reference responses: `python -m tests.faults`.

suite            one run of requests: before faults, during faults, and after them
injection        faults of the server's processes, at random times
traffic          clients that send requests until the faults end
questions        the requests
oracle           reference responses of a server without faults, and comparison with them
disconnects      clients that disconnect at every stage of a request
wire             HTTP/1.1 client with one socket per request
census           memory, files and tasks that a server holds
report           writer of docs/reliability.md
rolling_restart  two instances replaced in turn behind nginx
"""
