"""Stages of pipelines on this node, and the links between them."""
