"""Pure scheduling of engine and pipeline steps.

- `pipeline_scheduler`: the steps of a pipeline, as micro-batches
- `scheduler`: the tokens of the next step: admission, preemption, chunked prefill
- `sequence_table`: the unfinished sequences of an engine
- `tenant_queues`: the queues of a scheduler, and which one is served next
"""
