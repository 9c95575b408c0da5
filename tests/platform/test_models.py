"""Encoders, image models and a handler, deployed and called as a user does."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.fixtures.encoder_checkpoints import IMAGE, write_encoder
from tests.fixtures.hub import FakeHub, serving
from tests.fixtures.platform import Platform

PREPROCESSOR = {
    "do_resize": True,
    "size": {"height": IMAGE, "width": IMAGE},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.5, 0.5],
}


def picture() -> tuple[bytes, torch.Tensor]:
    """Return a PNG of the model's size, and the pixels that the model should see."""
    pixels = np.random.default_rng(1).integers(0, 256, (IMAGE, IMAGE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    mean, std = np.array(PREPROCESSOR["image_mean"]), np.array(PREPROCESSOR["image_std"])
    seen = (pixels / 255.0 - mean) / std
    return file.getvalue(), torch.tensor(seen.transpose(2, 0, 1)[None], dtype=torch.float32)


@pytest.mark.parametrize("kind", ["vit", "resnet-basic"])
def test_classification(platform: Platform, tmp_path: Path, kind: str) -> None:
    model = write_encoder(kind, tmp_path / kind)
    (tmp_path / kind / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    name = f"classify-{kind}"
    platform.run("deploy", str(tmp_path / kind), "--name", name)
    png, seen = picture()
    with torch.inference_mode():
        logits = model(pixel_values=seen).logits[0]
    wanted = {model.config.id2label[index]: float(value) for index, value in enumerate(logits)}
    encoded = base64.b64encode(png).decode()
    nested = np.asarray(Image.open(io.BytesIO(png))).tolist()
    (tmp_path / "cat.png").write_bytes(png)
    with platform.http() as http:
        answers = [
            http.post(f"/functions/{name}/invoke", json={"image": encoded, "top_k": len(wanted)}),
            http.post(f"/functions/{name}/invoke", json={"image": nested, "top_k": len(wanted)}),
            http.post(
                f"/functions/{name}/invoke?top_k={len(wanted)}",
                content=png,
                headers={"content-type": "image/png"},
            ),
        ]
        bad = http.post(f"/functions/{name}/invoke", json={"image": "AAAA"})
    assert bad.status_code == 400 and "image" in bad.json()["error"]["message"]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        labels = answer.json()["labels"]
        assert {row["label"] for row in labels} == set(wanted)
        assert all(abs(row["logit"] - wanted[row["label"]]) < 1e-5 for row in labels)
        assert abs(sum(row["score"] for row in labels) - 1) < 1e-5
    printed = platform.run("invoke", name, "--image", str(tmp_path / "cat.png")).stdout
    assert json.loads(printed)["labels"][0]["label"] == max(wanted, key=lambda label: wanted[label])
    platform.run("delete", name, "--yes")


def test_clip_features_of_text_and_image(platform: Platform, tmp_path: Path) -> None:
    model = write_encoder("clip", tmp_path / "clip")
    (tmp_path / "clip" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    platform.run("deploy", str(tmp_path / "clip"), "--name", "clip")
    png, seen = picture()
    ids = [0, 5, 9, 98]
    with torch.inference_mode():
        image = model.get_image_features(pixel_values=seen)
        text = model.get_text_features(input_ids=torch.tensor([ids]))
    with platform.http() as http:
        of_image = http.post("/functions/clip/invoke", json={"image": base64.b64encode(png).decode()})
        of_text = http.post("/functions/clip/invoke", json={"text": ids})
    for answer, wanted in ((of_image, image), (of_text, text)):
        assert answer.status_code == 200, answer.text
        values = wanted if isinstance(wanted, torch.Tensor) else wanted.pooler_output
        assert np.abs(np.array(answer.json()["features"][0]) - values[0].numpy()).max() < 1e-5
    platform.run("delete", "clip", "--yes")


def test_a_handler_of_ones_own(platform: Platform, root: Path) -> None:
    platform.run("deploy", str(root / "functions" / "echo"))
    assert json.loads(platform.run("invoke", "echo", "-d", '{"message": "hello there"}').stdout)
    streamed = platform.run("invoke", "echo", "-d", '{"message": "hello there"}', "--stream").stdout
    assert "hello" in streamed and "there" in streamed
    row = next(row for row in platform.json("usage", "report") if row["function"] == "echo")
    assert row["requests"] == 2
    platform.run("delete", "echo", "--yes")


def test_a_start_that_fails_says_why_in_the_log(platform: Platform, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "function.yaml").write_text("name: broken\nhandler: handler.py:handle\n")
    (folder / "handler.py").write_text("import a_module_that_nobody_has\n")
    platform.run("deploy", str(folder))
    done = platform.run("invoke", "broken", "-d", "{}", check=False)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr and "hypercast logs" in done.stderr
    assert "a_module_that_nobody_has" not in done.stderr
    assert "a_module_that_nobody_has" in platform.run("logs", "broken").stdout
    platform.run("delete", "broken", "--yes")


def test_a_handlers_error_has_the_request_id_and_no_line_of_another_tenant(
    platform: Platform, tmp_path: Path
) -> None:
    folder = tmp_path / "gossip"
    folder.mkdir()
    (folder / "function.yaml").write_text("name: gossip\nhandler: handler.py:handle\n")
    (folder / "handler.py").write_text(
        "import os\n"
        "def handle(request):\n"
        "    print('record', request, flush=True)\n"
        "    return {'crash': lambda: os._exit(9), 'raise': lambda: 1 // 0}.get(request, lambda: 'well')()\n"
    )
    platform.run("deploy", str(folder))
    with platform.http() as client:
        assert client.post("/functions/gossip/invoke", json="of tenant A").json() == "well"
        for request, words in (("raise", "ZeroDivisionError"), ("crash", "ended with status 9")):
            answer = client.post("/functions/gossip/invoke", json=request)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (500, "function_error")
            assert words in error["message"] and answer.headers["x-request-id"] in error["message"]
            assert "record" not in error["message"] and "handler.py" not in error["message"]
            if request == "raise":
                logged = platform.run("logs", "gossip").stdout
                assert f"request {answer.headers['x-request-id']}/0 failed" in logged
                assert "record of tenant A" in logged and "in handle" in logged
    platform.run("delete", "gossip", "--yes")


def test_a_model_of_a_hub_is_pinned_to_its_commit(platform: Platform, tmp_path: Path) -> None:
    write_encoder("vit", tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    files = {path.name: path.read_bytes() for path in (tmp_path / "vit").iterdir()}
    commit = "c0ffee" + "0" * 34
    hub = FakeHub(hub_id="some/vit", commits={commit: files}, branches={"v1.2": commit})
    before = dict(platform.env)
    with serving(hub):
        platform.env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        try:
            shown = platform.run("deploy", "some/vit", "--revision", "v1.2", "--name", "pinned").stdout
        finally:
            platform.env = before
    assert f"some/vit@{commit}" in shown
    assert f"some/vit@{commit}" in platform.run("describe", "pinned").stdout
    (row,) = [row for row in platform.json("list") if row["name"] == "pinned"]
    assert (row["source"], row["revision"]) == ("some/vit", commit)
    platform.run("delete", "pinned", "--yes")
