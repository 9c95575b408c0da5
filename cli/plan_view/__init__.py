"""Views of transfer plans.

- `pipelines`: the pipelines that the targets of a plan would form
- `picture`: a plan as a PNG
"""
