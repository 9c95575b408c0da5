"""asyncio helpers for the whole product: what asyncio lacks, or does at a higher cost.

- `closing`: ends of connections whose peer may not answer
- `eager`: coroutines that run up to their first wait at once
- `groups`: concurrent coroutines that fail as one
- `idle_set`: items without a user that expire
- `loop_lag`: a watchdog of the event loop
- `shielded`: waits and cleanup that a cancellation does not interrupt
- `threads`: blocking work in threads, with defined behaviour on cancellation
- `time_limit`: a cheaper asyncio.timeout
"""
