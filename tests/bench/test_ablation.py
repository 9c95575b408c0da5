"""The ablation on a small image: each technique is switched, and unavailable ones are recorded as skipped."""

import json
from pathlib import Path

import pytest

from benchmarks.ablation.command import main
from benchmarks.ablation.reads import by_blocks, by_tensors


@pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20, (3 << 20) + 1])
def test_reads_cover_the_image_once(nbytes: int) -> None:
    for reads in (by_blocks(nbytes, 16), by_tensors(nbytes)):
        assert reads.parts[0][0] == 0 and reads.parts[-1][1] == nbytes
        assert all(left[1] == right[0] for left, right in zip(reads.parts, reads.parts[1:], strict=False))
    assert len(by_tensors(3 << 20).parts) == 24 * 9


def test_every_part_is_on_and_off(tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    main(["--size", "2MiB", "--rounds", "1", "--blocks", "1,8", "--json", str(file)])
    rows = json.loads(file.read_text())
    measured = [row for row in rows if "skipped" not in row]
    keys = ("transport", "pre_allocation", "tensor_packing", "blocks")
    seen = {tuple(row["params"][key] for key in keys) for row in measured}
    for transport in ("shm", "tcp"):
        assert {(transport, False, False, None), (transport, True, False, None)} <= seen
        assert {(transport, False, True, 16)} | {
            (transport, True, True, blocks) for blocks in (1, 8, 16)
        } <= seen
    assert {row["params"]["bytes"] for row in rows} == {2 << 20}
    assert all(row["limit_s"] > 0 and len(row["seconds"]) == 1 for row in measured)
    skipped = [row for row in rows if "skipped" in row]
    assert [row["name"] for row in skipped] == ["registered host memory"] and skipped[0]["skipped"]
