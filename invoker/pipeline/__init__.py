"""Execution pipelines: a scheduler on the last stage, workers on the others.

- `driver`: the scheduler's side, with request streams
- `engines`: opens a stage over part of an image
- `metered`: charges steps to calls
- `remote_stage`: a stage on another node, controlled over its channel
- `stage_thread`: the thread that owns a stage and its links
- `worker`: a stage that receives steps and forwards them
"""
