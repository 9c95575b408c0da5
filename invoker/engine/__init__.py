"""Model execution on one accelerator: the only package that imports torch, beside functions/.

- `attention`: attention over the paged KV cache, as a Hugging Face attention function
- `batched_engine`: what engines of whole models share: sequences, KV pages, a scheduler
- `compute_threads`: the number of threads that torch computes with
- `contract`: the engine seam: protocols, sequences, outputs, errors
- `cuda_graphs`: decode steps captured and replayed as CUDA graphs
- `decoder`: the decoder engine: continuous batching over all layers
- `device_memory`: torch views of memory that torch did not allocate
- `encoders`: encoder models: embeddings, classification, features
- `factory`: engine factories: the seam of a node, and the torch implementation
- `families`: the decoder families: Hugging Face classes and tensor names
- `fused`, `fused_weights`: fused layers of the Llama family, and their binding to an image
- `hf_layers`: Hugging Face decoder layers as a layer stack
- `image_ranges`: the bytes of an image that a range of layers needs
- `image_views`: tensors of an image as views of memory
- `kv`: the paged KV cache
- `layout`: the layout of a step: flattened batch, index tensors, attention calls
- `output_stream`: the outputs of one `generate` call
- `paths`: the choice between fused layers and Hugging Face layers
- `projection`: matrix products in the form that is fastest for their size
- `runner`: the asyncio side of an engine: the thread that owns it
- `sampling`: token sampling from logits
- `scheduling`: pure scheduling of engine and pipeline steps
- `stage`: the executor of a contiguous range of layers
- `stage_contract`: the seam between pipeline stages
- `stage_engine`: a pipeline stage over a part of an image
- `stage_rows`: the rows that a step carries from stage to stage
- `weights`: binding of decoder layers to an image
"""
