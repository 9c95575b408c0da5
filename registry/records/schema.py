"""Versions of the records' schema: the one that every release reads, and what needs a later one.

A record says by its `schema` which version its content needs; one beyond BASE_SCHEMA is marked when it is
written (registry/codec.py), so that no earlier release takes a part of it for the whole. The first such
record also raises the schema of the cluster, and gateways of earlier releases refuse to serve.
"""

from registry.errors import NewerSchema

BASE_SCHEMA = 1
TENANCY_SCHEMA = 2  # roles other than admin and caller; functions with an owner, or not open to all
ENGINE_SCHEMA = 3  # versions whose model another engine runs than the node's own
# The highest that this release reads. Increase it with content that an earlier release would misread; a new
# field that may be ignored is none.
SCHEMA = ENGINE_SCHEMA


def check_schema(schema: int) -> None:
    """Raise NewerSchema if only a later release reads records of this schema."""
    if schema > SCHEMA:
        raise NewerSchema(
            f"the cluster's records have schema {schema}, and this release reads {SCHEMA} at most: "
            "upgrade this process"
        )
