"""Request and response bodies, parameters and the OpenAPI document.

- `admin`: request bodies of the admin API
- `anthropic`: bodies of Anthropic's messages
- `answers`: response bodies
- `casts`: casts as /admin/casts shows them
- `document`: the OpenAPI document
- `functions`: bodies of the generic invoke
- `jobs`: bodies of predictions, files and batches
- `open_inference`: bodies of the Open Inference Protocol
- `openai`: bodies of the OpenAI endpoints
- `operations`: one operation of the HTTP API
- `parameters`: parameters of paths, queries and headers
- `rerank`: bodies of /v1/rerank
- `responses`: bodies of OpenAI's responses
- `tokens`: bodies of /tokenize and /detokenize
"""
