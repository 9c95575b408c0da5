"""The instances of a node.

- `arrival_feed`: what arrives on the node, for gateways whose users watch a load
- `calls`: calls remembered until the gateway has settled them
- `device_cache`: images on the accelerator
- `device_copy`: copies images to the accelerator by layer
- `fair_lock`: a first-come-first-served lock between threads
- `instance`: one instance and its requests
- `lifecycle`: the state machine of an instance
- `load_feed`: loads of instances for gateways that follow them
- `manager`: starts and stops instances
- `start_context`: what starts need, and their phases
- `starting`: the start of a model or a handler
- `starting_group`: the start of a member of a group, with a part of the layers
- `starting_vllm`: the start of vLLM, alone or beside the native engine
"""
