"""Completion of names in shells: what the gateway or the configuration file has.

A shell waits for it at each press of the key, so that it ends soon, and silently if it fails.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from cli.client import Client
from cli.contexts import config_path, read_config
from cli.errors import CliError, ForbiddenError
from cli.settings import resolve

TIMEOUT_S = 2.0
MAX_NAMES = 1000

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def function_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the functions that the key may see or call."""
    return _matching(incomplete, _asked(ctx, _functions))


def node_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the nodes of the cluster."""
    return _matching(incomplete, _asked(ctx, _nodes))


def job_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the latest predictions and batches of the key's tenant."""
    return _matching(incomplete, _asked(ctx, _jobs))


def context_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the contexts of the user."""
    try:
        return _matching(incomplete, read_config(config_path(os.environ)).contexts)
    except (CliError, OSError):
        return []


def _functions(client: Client) -> list[str]:
    try:
        return [one["name"] for one in client.json("GET", "/admin/functions")["functions"]]
    except ForbiddenError:
        return [one["id"] for one in client.json("GET", "/v1/models")["data"]]


def _nodes(client: Client) -> list[str]:
    return [one["id"] for one in client.json("GET", "/admin/nodes")["nodes"]]


def _jobs(client: Client) -> list[str]:
    paths = ("/predictions", "/v1/batches")
    return [one["id"] for path in paths for one in client.json("GET", path, params={"limit": 100})["data"]]


def _asked(ctx: click.Context, ask: Callable[[Client], list[str]]) -> list[str]:
    given: dict[str, Any] = ctx.params
    try:
        ca = given.get("ca_file")
        settings = resolve(
            given.get("url"),
            given.get("api_key"),
            ca_file=Path(ca) if ca else None,
            context=given.get("context"),
        )
        with Client(settings, TIMEOUT_S) as client:
            return ask(client)
    except (CliError, OSError, KeyError, TypeError):
        return []


def _matching(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    found = sorted(name for name in names if name.startswith(incomplete))
    return [CompletionItem(name) for name in found[:MAX_NAMES]]
