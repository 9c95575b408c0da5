"""vLLM as an engine: its OpenAI server, a child process of the node on a Unix socket.

- `arguments`: the server's command line and environment
- `check_args`: checks arguments with vLLM itself, run by its interpreter
- `client`: requests to the server
- `errors`: the error of a server
- `events`: what the server answers, and its usage
- `forking`: the node's side of the zygote
- `host`: what a node needs to run servers
- `intervals`: the time of calls, by their tokens
- `launch`: the program that becomes the server, with a guard
- `model_infos`: what vLLM has found out about model classes
- `native_first`: the native engine until the server is ready
- `runner`: one instance's server as an engine
- `server`: the process
- `zygote`: the process that has imported vLLM and forks servers
"""
