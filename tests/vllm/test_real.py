"""Functions with engine: vllm on its CPU build: the official client, adapters, quantized weights, kills."""

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from openai import APIError, OpenAI
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fixtures.gateway_http import EOS, byte_tokenizer
from tests.fixtures.patience import PATIENCE_S, until_seen
from tests.fixtures.platform import Platform
from tests.vllm.interpreter import find_python

pytestmark = pytest.mark.vllm

REQUESTS, KILLS = 200, 20
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = (
    "--enable-auto-tool-choice --tool-call-parser hermes "
    '--structured-outputs-config \'{"backend": "xgrammar", "disable_any_whitespace": true}\''
)


def _write(folder: Path, *, seed: int = 1) -> LlamaForCausalLM:
    """Write a random Llama with a byte-level tokenizer and a chat template."""
    torch.manual_seed(seed)
    tokenizer: Tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=tokenizer.token_to_id(EOS),
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def _write_adapter(folder: Path, model: LlamaForCausalLM, rank: int = 4) -> None:
    """Write a LoRA adapter of the query and value projections."""
    folder.mkdir()
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            out, into = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, into)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _quantize(folder: Path, bits: int = 4, group: int = 64) -> None:
    """Make a checkpoint's linear layers 4-bit integers, a scale for each group of inputs, as GPTQ does."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.float16) for name, tensor in load_file(path).items()}
    each, half = 32 // bits, 1 << (bits - 1)
    shifts = torch.arange(each, dtype=torch.int64) * bits
    for name in [name for name in tensors if "_proj." in name]:
        weight = tensors.pop(name).float().t().contiguous()  # inputs, outputs
        inputs, outputs = weight.shape
        grouped = weight.view(inputs // group, group, outputs)
        scales = grouped.abs().amax(dim=1).clamp(min=1e-8) / (half - 1)
        codes = (grouped / scales[:, None]).round().clamp(-half, half - 1).to(torch.int64) + half
        packed = (codes.view(inputs // each, each, outputs) << shifts[None, :, None]).sum(dim=1)
        zeros = torch.full((inputs // group, outputs // each), half - 1, dtype=torch.int64)
        zeros = (zeros[..., None] << shifts).sum(dim=-1)
        stem = name.removesuffix("weight")
        tensors[stem + "qweight"] = packed.to(torch.int32)
        tensors[stem + "qzeros"] = zeros.to(torch.int32)
        tensors[stem + "scales"] = scales.to(torch.float16)
        tensors[stem + "g_idx"] = (torch.arange(inputs) // group).to(torch.int32)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": True,
    }
    config["dtype"] = "float16"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Start two nodes on two virtual hosts."""
    flags = ("--nodes", "2", "--hosts", "2", "--vllm-memory", "8GiB", "--vllm-python", str(find_python()))
    running = Platform(data=tmp_path_factory.mktemp("vllm") / "data", flags=flags)
    running.up()
    yield running
    running.down()


@pytest.fixture(scope="module")
def llama(vllm: Platform, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Deploy a random Llama with an adapter, and wait until vLLM serves it."""
    folder = tmp_path_factory.mktemp("llama")
    model = _write(folder / "model")
    _write_adapter(folder / "sql", model)
    flags = ("--engine", "vllm", "--engine-args", ARGUMENTS, "--lora", f"sql={folder / 'sql'}")
    vllm.run("deploy", str(folder / "model"), "--name", "llama", *flags, "--keep-alive", "1h")
    _ready(vllm, "llama")
    return "llama"


def _ready(platform: Platform, function: str, count: int = 1) -> list[dict[str, Any]]:
    platform.run("scale", function, "--instances", str(count))

    def served() -> list[dict[str, Any]]:
        found = [one for one in platform.instances(function) if one["engine"] == "vllm"]
        return found if len([one for one in found if one["state"] == "ready"]) >= count else []

    found: list[dict[str, Any]] = platform.until(f"vLLM serves {function}", served, timeout_s=240)
    return found


def _client(platform: Platform) -> OpenAI:
    return OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=200)


def _ids(client: OpenAI, function: str, prompt: list[int], tokens: int) -> list[int]:
    answer = client.completions.create(
        model=function,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


def test_tools_schemas_logprobs_and_usage(vllm: Platform, llama: str) -> None:
    ask = [{"role": "user", "content": "How is the weather?"}]
    with _client(vllm) as client:
        called = client.chat.completions.create(
            model=llama,
            messages=ask,  # type: ignore[arg-type]
            tools=[WEATHER],  # type: ignore[list-item]
            tool_choice={"type": "function", "function": {"name": "weather"}},
            temperature=2.0,  # else the random model adds white space without end
            max_tokens=600,
        )
        assert called.choices[0].message.tool_calls, called
        (call,) = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]
        schema = WEATHER["function"]["parameters"]  # type: ignore[index]
        shaped = client.chat.completions.create(
            model=llama,
            messages=ask,  # type: ignore[arg-type]
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},  # type: ignore[arg-type]
            max_tokens=64,
        )
        assert json.loads(shaped.choices[0].message.content or "")["city"] in ("Rome", "Oslo")
        likely = client.completions.create(model=llama, prompt="x", max_tokens=3, temperature=0, logprobs=2)
        assert likely.choices[0].logprobs is not None
        assert len(likely.choices[0].logprobs.token_logprobs or ()) == 3
        chunks = list(
            client.chat.completions.create(
                model=llama,
                messages=ask,  # type: ignore[arg-type]
                max_tokens=5,
                logprobs=True,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
        assert [one.usage.completion_tokens for one in chunks if one.usage] == [5]


def test_an_adapter_by_name(vllm: Platform, llama: str) -> None:
    with _client(vllm) as client:
        texts = [
            client.completions.create(model=name, prompt="hello", max_tokens=12, temperature=0)
            .choices[0]
            .text
            for name in (llama, f"{llama}/sql", f"{llama}:1/sql")
        ]
        assert texts[0] != texts[1] == texts[2]
        with pytest.raises(APIError, match="has no adapter 'nobody'; it has: sql"):
            client.completions.create(model=f"{llama}/nobody", prompt="x")


def test_quantized_weights(vllm: Platform, tmp_path: Path) -> None:
    _write(tmp_path / "plain", seed=3)
    _write(tmp_path / "gptq", seed=3)
    _quantize(tmp_path / "gptq")
    vllm.run("scale", "llama", "--instances", "0", check=False)
    vllm.run("deploy", str(tmp_path / "gptq"), "--name", "gptq", "--engine", "vllm")
    assert vllm.json("describe", "gptq")["current"]["native_first"] is False
    vllm.run("deploy", str(tmp_path / "plain"), "--name", "plain")
    with _client(vllm) as client:
        quantized, exact = (_ids(client, name, [72, 101, 108], 8) for name in ("gptq", "plain"))
    assert len(quantized) == 8 and quantized[0] == exact[0]  # later ones may differ by rounding
    for name in ("gptq", "plain"):
        vllm.run("delete", name, "--yes")


def _is_server(process: psutil.Process) -> bool:
    """Return whether it is a server: its guard has the server's command line, too, after its own."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "vllm.entrypoints.openai.api_server" in words and "invoker.vllm.launch" not in words


class _Turns:
    """Lets requests start in turns, so that some of each are under way when something is killed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = self._started = 0

    def open_next(self) -> None:
        """Let the next requests start, and return once one of them has."""
        with self._changed:
            before, self._allowed = self._started, self._allowed + REQUESTS // KILLS
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._started > before, PATIENCE_S)

    def take(self) -> int | None:
        """Return the number of a request that may start now, None after the last."""
        with self._changed:
            left = self._changed.wait_for(
                lambda: self._started < self._allowed or self._allowed == REQUESTS, PATIENCE_S
            )
            assert left
            if self._started == REQUESTS:
                return None
            self._started += 1
            self._changed.notify_all()
            return self._started - 1


def _victim(platform: Platform, function: str, number: int, drawn: random.Random) -> psutil.Process | None:
    """Return what to kill: a node once in four times, a server that serves each second time; or None yet."""
    pids = [node["pid"] for node in platform.nodes() if node["state"] == "ready"]
    if number % 4 == 3:
        try:
            return psutil.Process(drawn.choice(pids)) if pids else None
        except psutil.NoSuchProcess:  # killed before, and listed still
            return None
    if number % 2 == 0 and "vllm" not in _engines(platform, function):
        return None
    servers = [child for pid in pids for child in _children(pid) if _is_server(child)]
    return drawn.choice(servers) if servers else None


def _children(pid: int) -> list[psutil.Process]:
    """Return the children of a process and theirs; none if it has ended."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def test_two_hundred_requests_with_twenty_kills(vllm: Platform, llama: str) -> None:
    """Nothing is lost, repeated or changed, and the ledger is exact: streams and whole answers alike."""
    _ready(vllm, llama)
    drawn = random.Random(7)
    prompts = [[drawn.randrange(60, 120) for _ in range(drawn.randrange(1, 40))] for _ in range(20)]
    with _client(vllm) as client:
        expected = [_ids(client, llama, prompt, 24) for prompt in prompts]
    before = vllm.get("/admin/usage/report")["rows"]
    turns, wrong, done = _Turns(), list[str](), list[int]()

    def work() -> None:
        with _client(vllm) as client:
            while (number := turns.take()) is not None:
                which = number % len(prompts)
                try:
                    found = _one(client, llama, prompts[which], stream=number % 2 == 0)
                except APIError as error:
                    wrong.append(f"{number}: {error}")
                else:
                    done.append(number)
                    if found != expected[which]:
                        wrong.append(f"{number}: {found} is not {expected[which]}")

    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work) for _ in range(8)]
        for number in range(KILLS):
            look = partial(_victim, vllm, llama, number, drawn)
            victim = until_seen(f"there is something for kill {number}", look)
            assert victim is not None
            turns.open_next()
            victim.kill()
        for worker in workers:
            worker.result()
    assert not wrong and sorted(done) == list(range(REQUESTS))
    after = vllm.get("/admin/usage/report")["rows"]
    counts = [
        next((row for row in rows if row["function"] == llama), {"requests": 0, "completion_tokens": 0})
        for rows in (before, after)
    ]
    assert counts[1]["requests"] - counts[0]["requests"] == REQUESTS
    assert counts[1]["completion_tokens"] - counts[0]["completion_tokens"] == REQUESTS * 24
    vllm.until(
        "the ledger adds up", lambda: vllm.run("usage", "check", check=False).returncode == 0, timeout_s=120
    )


def _one(client: OpenAI, model: str, prompt: list[int], *, stream: bool) -> list[int]:
    if not stream:
        return _ids(client, model, prompt, 24)
    return [token for token, _ in _streamed(client, model, prompt, 24)]


def _streamed(client: OpenAI, model: str, prompt: list[int], tokens: int) -> list[tuple[int, float]]:
    """Return the tokens of a stream, with when each arrived (`time.monotonic`)."""
    found: list[tuple[int, float]] = []
    for chunk in client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ):
        new: list[int] = chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
        found += [(token, time.monotonic()) for token in new]
    return found


def _engines(platform: Platform, function: str) -> list[str]:
    return [one["engine"] for one in platform.instances(function)]


def test_from_zero_the_native_engine_answers_and_vllm_takes_over(vllm: Platform, llama: str) -> None:
    """Stream until a stream has ended in which vLLM took over: it starts longer than one lasts."""
    vllm.run("scale", llama, "--instances", "0")
    vllm.until("it sleeps", lambda: not vllm.instances(llama))
    prompt = [72, 101, 108, 108, 111]
    streams: list[list[tuple[int, float]]] = []
    engines: list[set[str]] = []  # after each stream, of all instances
    began = time.monotonic()
    with _client(vllm) as client:
        while {"vllm"} not in engines:
            streams.append(_streamed(client, llama, prompt, 1000))
            engines.append(set(_engines(vllm, llama)))
        assert all("native" in one for one in engines[:-1])
        gaps = [after - before for one in streams for (_, before), (_, after) in pairwise(one)]
        first_s = streams[0][0][1] - began
        print(f"first token {first_s:.2f} s, {len(streams)} streams, largest gap {max(gaps):.2f} s")
        assert first_s <= 1.5
        by_vllm = _ids(client, llama, prompt, 1000)
        assert all([token for token, _ in one] == by_vllm for one in streams)
