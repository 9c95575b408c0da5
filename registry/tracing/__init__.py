"""Traces: spans made from records, after the fact, and their export by OTLP.

- `context`: trace and span ids, the W3C headers
- `sampling`: which requests are traced
- `settings`: their settings
- `span`: a span, the protocol of what records them, and a fake of it
- `otlp`: their export with the SDK of OpenTelemetry, an extra
"""
