"""All experiments of the three papers in parts, and the page that compares: `python -m benchmarks.paper`.

- `charts`: plots that no single benchmark draws
- `claims`: what the papers report, and which of our figures stand beside it
- `command`: the command
- `headline`: the measures that the page shows for every trace
- `page`: docs/RESULTS.md from the claims and the result files
- `parts`: the parts: one run of a benchmark each
- `pictures`: the plots beside the page
- `plan`: which parts are done, and which are to run
- `runner`: runs them
- `sources`: the files behind each name that claims use
"""
