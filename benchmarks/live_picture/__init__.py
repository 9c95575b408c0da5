"""One load that serves requests meanwhile: `python -m benchmarks.live_picture`.

- `command`: the command and its recorder
- `draw`: the picture
"""
