"""Requests served while nodes load: `python -m benchmarks.live_serving`.

- `arguments`: options shared with other benchmarks
- `check`: checks of responses and ledger rows
- `client`: requests with known tokens, and their clients
- `command`: the command and its record
- `models`: small random models of three families
- `platform`: a platform with slow links
- `run`: loads with requests and kills
"""
