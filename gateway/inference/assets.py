"""The small files of a function version (config, tokenizer, chat template), parsed and cached."""

import asyncio
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jinja2
import msgspec
from tokenizers import Tokenizer

from gateway.core.errors import ApiError, Unavailable
from gateway.inference.chat_template import ChatTemplate, template_source
from gateway.inference.detokenize import token_texts
from rdmacast.aio.groups import cancel_and_discard
from registry.errors import ImageError, NotFound
from registry.images.store import Blobs
from registry.records.function import FunctionVersion

MAX_ASSET_BYTES = 64 << 20
_POOLING = "1_Pooling/config.json"
READ_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    _POOLING,
)
_INDEX = re.compile("[0-9]{1,6}")  # of a label: bounded, since there is one for each index up to the last
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The library's own threads take one batch after the other, so that a long one would delay all others.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Key = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAssets:
    """The parsed files of a version. `tokenizer` is None where it has none."""

    config: Mapping[str, object] = field(default_factory=dict)
    preprocessor: Mapping[str, object] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    token_text: Callable[[int], str] = str
    template: ChatTemplate | None = None
    tool_template: ChatTemplate | None = None
    eos_token_ids: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    pooling: str = "mean"
    generation: Mapping[str, object] = field(default_factory=dict)  # generation_config.json


_CAPACITY = 64  # of the cache


class AssetCache:
    """An LRU cache of assets by content, so that versions with the same files share them."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._ready: OrderedDict[Key, ModelAssets] = OrderedDict()
        self._loading: dict[Key, asyncio.Task[ModelAssets]] = {}

    async def get(self, version: FunctionVersion) -> ModelAssets:
        """Return the version's assets.

        Raises Unavailable if the store cannot be read, ApiError if a file cannot be parsed.
        """
        key = frozenset((name, version.assets[name]) for name in READ_FILES if name in version.assets)
        if (ready := self._ready.get(key)) is not None:
            self._ready.move_to_end(key)
            return ready
        # Concurrent requests share one load, which continues if the first of them is cancelled.
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key), name=f"assets {version.function}:{version.version}")
            self._loading[key] = task
            task.add_done_callback(lambda done: self._loaded(key, done))
        return await asyncio.shield(task)

    def _loaded(self, key: Key, task: asyncio.Task[ModelAssets]) -> None:
        del self._loading[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._ready[key] = task.result()
        while len(self._ready) > _CAPACITY:
            self._ready.popitem(last=False)

    async def _load(self, key: Key) -> ModelAssets:
        files: dict[str, bytes] = {}
        for name, digest in sorted(key):
            try:
                files[name] = await self._blobs.read(digest, limit=MAX_ASSET_BYTES)
            except (NotFound, ImageError) as error:
                raise Unavailable(
                    f"the store cannot be read for the function's {name}: {error}", code="assets_unavailable"
                ) from error
        return await asyncio.to_thread(parse_assets, files)

    async def aclose(self) -> None:
        """Cancel loads under way."""
        await cancel_and_discard(*self._loading.values())


def parse_assets(files: Mapping[str, bytes]) -> ModelAssets:
    """Parse the files. Raises ApiError naming a file that cannot be parsed."""
    config, generation = _json(files, "config.json"), _json(files, "generation_config.json")
    tokenizer_config = _json(files, "tokenizer_config.json")
    tokenizer = _tokenizer(files.get("tokenizer.json"))
    template = tool_template = None
    if tokenizer is not None:
        special = _special_tokens(tokenizer_config, _json(files, "special_tokens_map.json"))
        jinja = files.get("chat_template.jinja")
        try:
            source, tool_source = template_source(tokenizer_config, None if jinja is None else jinja.decode())
            template = ChatTemplate(source, special)
            tool_template = None if tool_source is None else ChatTemplate(tool_source, special)
        except (jinja2.TemplateError, UnicodeDecodeError, RecursionError) as error:
            raise _unreadable("chat template", error) from error
    return ModelAssets(
        config=config,
        preprocessor=_json(files, "preprocessor_config.json"),
        tokenizer=tokenizer,
        token_text=token_texts(tokenizer),
        template=template,
        tool_template=tool_template,
        eos_token_ids=_eos(generation, config),
        labels=_labels(config),
        generation=generation,
        pooling="cls" if _json(files, _POOLING).get("pooling_mode_cls_token") else "mean",
    )


def _unreadable(name: str, error: Exception) -> ApiError:
    return ApiError(500, "function_error", f"the function's {name} cannot be parsed: {error}")


def _json(files: Mapping[str, bytes], name: str) -> dict[str, object]:
    if name not in files:
        return {}
    try:
        return msgspec.json.decode(files[name], type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(name, error) from error


def _tokenizer(data: bytes | None) -> Tokenizer | None:
    if data is None:
        return None
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise _unreadable("tokenizer.json", error) from error
    # Files of embedding models often have the trainer's padding and truncation; here a text that is too
    # long is refused, never silently truncated.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL:
        for source in sources:
            given = source.get(name)
            if isinstance(given, dict):
                given = given.get("content")
            if isinstance(given, str):
                tokens[name] = given
                break
    return tokens


def _eos(generation: Mapping[str, object], config: Mapping[str, object]) -> tuple[int, ...]:
    text_config = config.get("text_config")
    for source in (generation, config, text_config if isinstance(text_config, dict) else {}):
        given = source.get("eos_token_id")
        if isinstance(given, int):
            return (given,)
        if isinstance(given, list):
            return tuple(token for token in given if isinstance(token, int))
    return ()


def _labels(config: Mapping[str, object]) -> tuple[str, ...]:
    given = config.get("id2label")
    if not isinstance(given, dict):
        return ()
    numbered = {int(index): str(label) for index, label in given.items() if _INDEX.fullmatch(index)}
    return tuple(numbered.get(index, f"LABEL_{index}") for index in range(max(numbered, default=-1) + 1))
