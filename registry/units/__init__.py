"""Parsers of durations, moments, sizes and rates in human-readable form.

- `durations`: `90s`, `1h30m`
- `moments`: `24h` ago, ISO 8601, Unix seconds
- `sizes`: `256MiB`, `200mbit`
"""
