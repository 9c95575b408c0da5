"""Benchmarks and experiments; run one with `python -m benchmarks.NAME --json FILE`.

- `ablation`: pre-allocation, tensor packing and block count of a transfer
- `cast_faults`: casts in which nodes are killed and blocks corrupted
- `channel`: the gateway-invoker channel beside other libraries
- `chaos`: random kills of a platform's processes under load
- `data`: compact request traces
- `demo`: every kind of start on three nodes, for people
- `engine`: tokens per second beside transformers
- `fairness`: what a flooding tenant costs another one
- `gateway_overhead`: what the platform adds to a call
- `gpu_check`: checks and figures of a machine with a GPU
- `harness`: what benchmarks share
- `ledger_archive`: millions of ledger records through the archive, and reports over them
- `live_picture`: one load that serves requests meanwhile, drawn
- `live_serving`: tokens of requests served while nodes load, with kills
- `live_serving_switch`: the cost of a switch from a pipeline to one node
- `load`: weights from disk to host memory and device
- `multicast`: casts over shaped links beside gloo, Open MPI and NIXL
- `multicast_sim`: simulated casts of large models
- `policy_scale`: decisions on the numbers of instances at 1,000 nodes
- `replay`: a request trace against a running gateway
- `results`: the records that the documents quote
- `scaleout`: how soon nodes serve a model that few of them hold
- `starts`: starts of an instance from every tier
- `tables`: writes the documents' figures from `results`
- `testbed`: several hosts on one machine
- `zigzag`: an overloaded instance helped by a loading node
"""
