"""Emulated accelerators: step times from a profile, real queues, pages and transfers.

- `arena`: the memory of an emulated device
- `arrival`: the check that the bytes of some layers have arrived
- `device_clock`: the serial clock of an emulated device
- `engine`: the decoder engine of an emulated device
- `engines`: the engine factory of an emulated node
- `image`: the image of an emulated model: incompressible, reproducible bytes
- `kv`: stand-ins for K and V that record their tokens
- `profiles`: step times by datasheet
- `stage`: the pipeline stage of an emulated device
- `tokens`: the deterministic tokens of an emulated model
"""
