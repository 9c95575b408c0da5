"""Text and images: tokenization, chat templates, preprocessing.

- `assets`: the small files of a version, cached
- `chat_template`: sandboxed chat templates
- `detokenize`: tokens to text, stop strings
- `images`: images in requests
- `preprocess`: the steps of Hugging Face image processors
- `tool_calls`: tool calls in generated text
- `tokenization`: prompts to token ids
"""
