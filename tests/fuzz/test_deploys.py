"""Damaged files at a deploy: refused there with a clear error, or fit to be used; never a fault of ours."""

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from registry.config.function_yaml import parse_function_yaml
from registry.errors import InvalidRecord
from registry.images.codec import encode_manifest
from registry.images.pack import hash_image, plan_checkpoint
from registry.images.plan import image_chunks
from tests.fixtures.gateway_http import Gateway, gateway, tokenizer_with_bos
from tests.fixtures.images import llama_config, llama_tensors, write_checkpoint

CASES = 200
SEED = 20
CONFIG = {
    **llama_config(max_position_embeddings=64),
    "eos_token_id": 3,
    "vocab_size": 300,
    "id2label": {"0": "a"},
}
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "<|end|>"},
    "chat_template": "{{ messages }}",
}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
YAML = (Path(__file__).resolve().parents[2] / "functions" / "echo" / "function.yaml").read_bytes()
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1 << 70, float("nan"), "", "x" * 1000, [], [None], {}, {"content": 5}),
    *({"999999999999": "x", "²": "y"}, [[[]]], "{% for %}", "{{ 1/0 }}", "{{ ''.__class__ }}"),
)
TOKENS = (
    *(b"2001-99-99", b"!!int x", b"!!float x", b"!!timestamp x", b"!!binary '!'", b"9" * 6000, b"<<: 1"),
    *(b"&a [*a]", b"*b", b"? [a]: b", b".nan", b"!!python/object:os.system x", b"\x00", b"\xff", b"[" * 2000),
)


def flip(random_: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(random_.randint(1, 5)):
        changed[random_.randrange(len(raw))] ^= 1 << random_.randrange(8)
    return bytes(changed)


def cut(random_: random.Random, raw: bytes) -> bytes:
    return raw[: random_.randrange(len(raw))]


def replace(random_: random.Random, raw: bytes) -> bytes:
    """One value of a JSON object by another, or the whole of it."""
    try:
        whole = json.loads(raw)
    except ValueError:
        return random_.choice(VALUES[-3:]).encode()
    whole[random_.choice(sorted(whole))] = random_.choice(VALUES)
    return json.dumps(random_.choice([whole, whole, whole, [whole], None])).encode()


def other(random_: random.Random, raw: bytes) -> bytes:
    return random_.choice([b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"null", raw + raw])


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (flip, cut, replace, other)


async def deploy(gw: Gateway, http: httpx2.AsyncClient, files: dict[str, bytes], **changes: object) -> Any:
    assets = {name: gw.blobs.put(data) for name, data in files.items()}
    return await http.post("/admin/functions", json={"name": "fuzzed", "assets": assets, **changes})


def test_damaged_files_of_a_model(tmp_path: Path) -> None:
    """What is taken is used as well: the chat is rendered and tokenised, then refused as too long."""
    plan = plan_checkpoint(write_checkpoint(tmp_path, llama_tensors(), CONFIG))
    image = b"".join(image_chunks(plan))
    good = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": tokenizer_with_bos().to_str().encode(),
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        "generation_config.json": json.dumps({"eos_token_id": [3]}).encode(),
        "special_tokens_map.json": json.dumps({"bos_token": "<s>"}).encode(),
    }
    manifest = encode_manifest(hash_image(plan))
    chat = {"model": "fuzzed", "max_tokens": 1_000_000, "messages": [{"role": "user", "content": "hi"}]}
    random_ = random.Random(SEED)
    answers: Counter[int] = Counter()

    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            for case in range(CASES):
                name = random_.choice([*good, "manifest"])
                mutate = MUTATIONS[case % len(MUTATIONS)]
                files = good if name == "manifest" else {**good, name: mutate(random_, good[name])}
                made = await deploy(
                    gw,
                    http,
                    files,
                    task="generate",
                    architecture="LlamaForCausalLM",
                    image=gw.blobs.put(image),
                    manifest=gw.blobs.put(mutate(random_, manifest) if name == "manifest" else manifest),
                    dtype="float32",
                    context_length=64,
                )
                answers[made.status_code] += 1
                assert made.status_code in (201, 400, 422), (case, name, made.text)
                if made.status_code != 201:
                    assert made.json()["error"]["message"]
                    continue
                asked = await http.post("/v1/chat/completions", json=chat)
                assert asked.status_code == 400, (case, name, asked.text)

    asyncio.run(main())
    assert answers[422] > CASES // 3 and answers[201], answers


async def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    plan = plan_checkpoint(write_checkpoint(tmp_path, llama_tensors(), CONFIG))
    files = {"config.json": json.dumps(CONFIG).encode()}
    async with gateway() as gw, gw.http() as http:
        image = gw.blobs.put(b"".join(image_chunks(plan)))
        blobs = {"image": image, "manifest": gw.blobs.put(encode_manifest(hash_image(plan)))}
        model = {"task": "generate", "architecture": "LlamaForCausalLM", **blobs}
        long = await deploy(gw, http, files, context_length=65, **model)
        assert (long.status_code, long.json()["error"]["param"]) == (422, "context_length")
        assert (await deploy(gw, http, files, context_length=64, **model)).status_code == 201


def damaged_yaml(random_: random.Random) -> bytes:
    place = random_.randrange(len(YAML))
    kind = random_.randrange(3)
    if kind == 0:
        return YAML[:place] + random_.choice(TOKENS) + YAML[place:]
    if kind == 1:
        return flip(random_, YAML)
    value = random_.choice([b"30s", b"256MiB", b"60s", b"handler.py:handle", b"4MiB"])
    return YAML.replace(value, random_.choice(TOKENS), 1)


def test_damaged_function_yaml() -> None:
    random_ = random.Random(SEED)
    refused = 0
    for _ in range(CASES * 5):
        try:
            parse_function_yaml(damaged_yaml(random_))
        except InvalidRecord as error:
            assert str(error)
            refused += 1
    assert refused > CASES


@pytest.mark.parametrize("text", [b"handler: [", b"handler: ../x.py:f", b"memory: 1", b"scaling: !!int x"])
async def test_a_handler_with_bad_settings_is_not_registered(text: bytes) -> None:
    async with gateway() as gw, gw.http() as http:
        files = {"handler.py": b"", "function.yaml": text}
        made = await deploy(gw, http, files, task="handler", architecture="Handler")
        assert made.status_code == 422 and "function.yaml" in made.json()["error"]["message"]
        assert hashlib.sha256(text).hexdigest() in gw.blobs.blobs
