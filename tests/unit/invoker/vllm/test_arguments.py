"""The server's command line and environment."""

from dataclasses import replace
from pathlib import Path

from invoker.vllm.arguments import VllmSpec, server_command, server_environment

SPEC = VllmSpec(
    python=Path("/venv/bin/python"),
    folder=Path("/shm/models/f-1"),
    scratch=Path("/tmp/x"),
    name="f",
    dtype="bfloat16",
    context_length=4096,
    max_sequences=8,
    device="cpu",
    memory_bytes=16 << 30,
)


def _value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_server_gets_its_model_and_socket() -> None:
    command = server_command(SPEC)
    assert command[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert _value(command, "--model") == "/shm/models/f-1" and _value(command, "--uds") == "/tmp/x/http.sock"
    assert _value(command, "--served-model-name") == "f" and _value(command, "--max-model-len") == "4096"
    assert "--enforce-eager" in command and "--load-format" not in command
    assert "--enforce-eager" not in server_command(replace(SPEC, device="cuda:1"))


def test_the_functions_arguments_count() -> None:
    command = server_command(replace(SPEC, arguments=("--max-model-len=512", "--dtype", "float32")))
    assert "4096" not in command and "bfloat16" not in command
    assert command[-3:] == ["--max-model-len=512", "--dtype", "float32"]


def test_one_process_runs_a_model_on_a_cpu() -> None:
    assert _value(server_command(SPEC), "--distributed-executor-backend") == "uni"
    assert server_environment(SPEC, {})["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    for changes in ({"device": "cuda:0"}, {"arguments": ("--tensor-parallel-size=2",)}):
        spec = replace(SPEC, **changes)
        assert "--distributed-executor-backend" not in server_command(spec)
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in server_environment(spec, {})


def test_the_loader_is_the_plug_in() -> None:
    command = server_command(replace(SPEC, loader={"image": "ab", "socket": "/s"}))
    assert _value(command, "--load-format") == "hypercast"
    assert _value(command, "--model-loader-extra-config") == '{"image": "ab", "socket": "/s"}'


def test_adapters_have_names_and_folders() -> None:
    command = server_command(replace(SPEC, adapters={"sql": 4, "chat": 20}))
    at = command.index("--lora-modules")
    assert command[at + 1 : at + 3] == ["f/sql=/shm/models/f-1/lora/sql", "f/chat=/shm/models/f-1/lora/chat"]
    assert "--enable-lora" in command and _value(command, "--max-lora-rank") == "32"


def test_no_secret_is_inherited() -> None:
    node = {
        "PATH": "/bin",
        "HYPERCAST_CLUSTER_SECRET": "s",
        "HF_TOKEN": "t",
        "PYTHONPATH": "/x",
        "HOME": "/root",
    }
    made = server_environment(SPEC, node)
    assert made["PATH"] == "/bin" and made["HOME"] == "/tmp/x" and made["HF_HUB_OFFLINE"] == "1"
    assert not {"HYPERCAST_CLUSTER_SECRET", "HF_TOKEN", "PYTHONPATH"} & made.keys()
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "4" and "CUDA_VISIBLE_DEVICES" not in made
    for visible, name in ((None, "3"), ("", "3"), ("4, 5,6,7", "7"), ("4", "3"), ("a,b,c,GPU-d", "GPU-d")):
        given = node if visible is None else {**node, "CUDA_VISIBLE_DEVICES": visible}
        assert server_environment(replace(SPEC, device="cuda:3"), given)["CUDA_VISIBLE_DEVICES"] == name
    for visible, names in ((None, "1,3"), ("4,5,6,7", "5,7"), ("a,GPU-b,c,GPU-d", "GPU-b,GPU-d")):
        given = node if visible is None else {**node, "CUDA_VISIBLE_DEVICES": visible}
        assert server_environment(replace(SPEC, device="cuda:1,3"), given)["CUDA_VISIBLE_DEVICES"] == names


def test_a_server_has_a_process_for_each_part_of_its_model() -> None:
    halves = replace(SPEC, arguments=("--tensor-parallel-size", "2"))
    assert server_environment(halves, {})["VLLM_CPU_KVCACHE_SPACE"] == "2"
