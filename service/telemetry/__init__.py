"""Request log and traces: one record per HTTP request, made at its end."""
