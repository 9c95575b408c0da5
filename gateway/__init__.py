"""The gateway: HTTP in, routing, scaling and the bill. Stateless but for requests in flight."""
