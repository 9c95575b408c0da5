"""The reference pages of the documents, written from the code: `python -m cli.reference FOLDER`.

- `command_line`: the page of all commands, from their parsers
- `http_api`: the pages of all operations and their types, from the OpenAPI document
- `markdown`: tables, code and anchors
- `metrics`: the page of all metrics, from their registry
- `pages`: all pages, as files
- `settings`: the page of all settings, from what parses them
"""
