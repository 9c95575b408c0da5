"""The console's files, which the gateway serves at /ui as they are checked in: there is no build.

- `files`: the files in memory, and the headers of a response with one
- `static/`: the console (HTML, CSS, JavaScript modules)
- `vendor/`: Preact and htm, with their licences
"""
