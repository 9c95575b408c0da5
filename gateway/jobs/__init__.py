"""Jobs: calls that run later, beside those of clients, and batches of them.

- `batch_driver`: the loop that carries batches on, on the gateway that leads
- `batch_input`: the lines of a batch's file
- `batch_output`: the lines of a batch's results
- `batch_steps`: the next step of a batch, as a pure decision
- `batch_view`: batches as their clients see them
- `destinations`: the addresses that webhooks may go to
- `file_store`: files as blobs of the store
- `hook_messages`: the messages of webhooks
- `hook_sender`: the delivery of webhooks
- `outcomes`: how a job goes on after its request
- `predictions`: jobs as their clients see them
- `runner`: the jobs that this gateway runs
- `service`: all of it, as one task
- `signatures`: signatures of webhooks
"""
