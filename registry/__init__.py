"""What gateway and invoker share: records, messages, model images, state in Redis, the usage ledger."""
