"""One HTTP request: its calls, its response and its bill.

- `billed_request`: the calls of a request, billed once
- `change_log`: the audit log of changes
- `compute`: encoder calls
- `encoder_reply`: the response of encoder calls
- `formats`: the JSON of completions and chat
- `forwarded_chat`: from the response of another engine's server to what the client gets
- `forwarded_reply`: the response of another engine's server
- `forwarding`: which requests pass through, and what is sent of them
- `functions`: names to function versions
- `generation`: the choices of a generation
- `generation_reply`: the response of a generation
- `grammar`: the grammar that a request's text follows
- `handler_reply`: the response of a custom handler
- `job_call`: the request of a job
- `messages_format`, `messages_input`: Anthropic's messages
- `middleware`: the layer around all requests
- `reply_format`: what encodes the response of a generation
- `responses_format`, `responses_input`: OpenAI's responses
- `routing`: routes from the table of operations
- `services`: the dependencies of the handlers
- `shadows`: copies of requests to a version that is being rolled out
- `spans`: the spans of a request, at its end
- `task_inputs`: which input a task takes
- `tensors`: tensors of the Open Inference Protocol
- `tool_choice`: the tools of a chat, and the call that it forces
"""
