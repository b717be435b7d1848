"""Faults under a real server's feet, and every answer held against an oracle: `python -m tests.faults`.

suite            one run: undisturbed, under faults, and afterwards
injection        what is done to the processes, and when
traffic          clients that ask until they are told to stop
questions        what is asked
oracle           what an undisturbed server answers
disconnects      clients that leave
wire             HTTP/1.1 on a socket of its own for each request
census           what a server holds
report           docs/reliability.md
rolling_restart  two instances replaced in turn behind nginx
"""
