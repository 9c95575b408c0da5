"""Authentication, quotas and the health check of Redis.

- `access`: which keys may call, see and change a function
- `auth`: Bearer keys and their rights
- `concurrency_leases`: leases of keys with a concurrency limit
- `cost_estimates`: what a request may cost, for the reservation in a spend limit
- `quotas`: admission under a key's limits, rate-limit headers
- `state_health`: whether Redis is available, and the price table
"""
