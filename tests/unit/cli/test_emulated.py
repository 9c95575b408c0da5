"""Deploying emulated models."""

from pathlib import Path

import pytest

from cli.commands.deploy import scaling_given
from cli.errors import DeployError
from cli.upload.bundle import bundle_model, model_source
from registry.config.function_yaml import parse_function_yaml
from registry.errors import InvalidRecord
from registry.images.codec import decode_manifest
from registry.records.function import FunctionTask


def test_a_deploy_packs_bytes_that_stand_for_the_model() -> None:
    bundle = bundle_model("emulated:llama2-7b/10000", "auto", "a test", None)
    assert (bundle.task, bundle.dtype, bundle.context_length) == (FunctionTask.GENERATE, "bfloat16", 4096)
    assert bundle.architecture == "emulated:llama2-7b/10000" and bundle.plan is not None
    assert bundle.manifest is not None
    manifest = decode_manifest(bundle.blobs[bundle.manifest])
    assert (manifest.sha256, manifest.nbytes) == (bundle.image, bundle.image_bytes)
    assert b'"vocab_size": 32000' in bundle.blobs[bundle.assets["config.json"]]


def test_a_function_yaml_may_name_one(tmp_path: Path) -> None:
    spec = parse_function_yaml("name: f\nmodel: emulated:llama2-13b/1000\n")
    assert spec.model_folder(tmp_path) is None
    assert model_source(str(tmp_path), spec) == "emulated:llama2-13b/1000"


def test_a_deploy_sends_only_the_settings_that_are_given() -> None:
    """The gateway chooses the others: those of a new function by its task."""
    spec = parse_function_yaml("name: f\nmodel: m\nscaling: {keep_alive: 5m, min_instances: 1}\n")
    flags = {"min_instances": 0, "max_instances": None, "policy": None}
    assert scaling_given(spec, flags) == {"keep_alive_s": 300.0, "min_instances": 0}
    assert scaling_given(None, flags) == {"min_instances": 0}
    slower = parse_function_yaml("name: f\nmodel: m\nscaling: {tbt_target: 1s}\n")
    with pytest.raises(InvalidRecord, match=r"--tbt-target\) .*--scaling load"):
        scaling_given(slower, {"target_concurrency": 4})


def test_what_is_no_emulated_model_is_refused() -> None:
    for source, words in (("emulated:gpt", "use llama2-7b"), ("emulated:", "use emulated:MODEL")):
        with pytest.raises(InvalidRecord, match=words):
            bundle_model(source, "auto", "", None)
    with pytest.raises(DeployError, match="no weights that could be float32"):
        bundle_model("emulated:llama2-7b/10000", "float32", "", None)
    with pytest.raises(DeployError, match="task embed"):
        bundle_model("emulated:llama2-7b/10000", "auto", "", FunctionTask.EMBED)
