"""One HTTP request: its calls, its response and its bill.

- `billed_request`: the calls of a request, billed once
- `change_log`: the audit log of changes
- `compute`: encoder calls
- `formats`: the JSON of completions and chat
- `forwarded_reply`: the response of another engine's server
- `forwarding`: which requests pass through, and what is sent of them
- `functions`: names to function versions
- `generation`: the choices of a generation
- `generation_reply`: the response of a generation
- `grammar`: the grammar that a request's text follows
- `handler_reply`: the response of a custom handler
- `job_call`: the request of a job
- `middleware`: the layer around all requests
- `routing`: routes from the table of operations
- `services`: the dependencies of the handlers
- `shadows`: copies of requests to a version that is being rolled out
- `spans`: the spans of a request, at its end
- `task_inputs`: which input a task takes
- `tool_choice`: the tools of a chat, and the call that it forces
"""
