"""HTTP edge of the API process: connections, authentication, request bodies, load shedding."""
