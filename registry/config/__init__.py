"""Configuration: function.yaml, the options of processes, secrets and emulated devices.

- `command_line`: the command lines of processes, made from Options
- `devices`: the names of CUDA devices, one or several of a node
- `emulation`: the names of emulated models and devices
- `engine_args`: the arguments that a function may give its engine
- `function_secrets`: the secrets of functions: set, opened, encrypted anew
- `function_yaml`: the declaration of a function
- `function_yaml_help`: what each of its keys is for
- `handler_spec`: what it declares of a handler: its function, environment and limits
- `option_types`: flags and the types of their values
- `options`: the options of `up`, `gateway` and `invoker`, each declared once
- `sealing`: encryption with keys derived from the cluster's secret
- `rotation`: a new secret for the cluster without a stop
- `secrets`: API keys and the cluster's secret
- `tls`: the files of TLS by connection, from the options
"""
