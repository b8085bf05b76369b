"""HTTP: what the server and the router share. Protocol, limits, receiving, origins, keys, errors,
tracing."""
