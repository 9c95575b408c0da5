"""vLLM's findings about its model classes, from one server to the next."""

from pathlib import Path

from invoker.vllm.model_infos import MAX_BYTES, MAX_FILES, ModelInfos


def _scratch(parent: Path, name: str, infos: ModelInfos) -> Path:
    scratch = parent / name
    scratch.mkdir()
    infos.write_into(scratch)
    return scratch


def _files(scratch: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (scratch / "cache" / "modelinfos").iterdir()}


def test_findings_go_from_one_server_to_the_next(tmp_path: Path) -> None:
    infos = ModelInfos()
    first = _scratch(tmp_path, "first", infos)
    assert _files(first) == {}
    (first / "cache" / "modelinfos" / "vllm-llama-Llama.json").write_bytes(b"{}")
    infos.keep(first)
    assert _files(_scratch(tmp_path, "second", infos)) == {"vllm-llama-Llama.json": b"{}"}


def test_only_small_files_of_the_folder_itself_are_kept(tmp_path: Path) -> None:
    infos = ModelInfos()
    folder = _scratch(tmp_path, "first", infos) / "cache" / "modelinfos"
    (tmp_path / "secret").write_bytes(b"s")
    (folder / "link.json").symlink_to(tmp_path / "secret")
    (folder / "folder.json").mkdir()
    (folder / "large.json").write_bytes(b" " * (MAX_BYTES + 1))
    (folder / "other.txt").write_bytes(b"x")
    (folder / "good.json").write_bytes(b" " * MAX_BYTES)
    infos.keep(tmp_path / "first")
    assert list(_files(_scratch(tmp_path, "second", infos))) == ["good.json"]


def test_their_number_is_bounded(tmp_path: Path) -> None:
    infos = ModelInfos()
    for server in range(3):
        scratch = tmp_path / str(server)
        folder = scratch / "cache" / "modelinfos"
        folder.mkdir(parents=True)
        for number in range(MAX_FILES // 2 + 1):
            (folder / f"{server}-{number}.json").write_bytes(b"{}")
        infos.keep(scratch)
    assert len(_files(_scratch(tmp_path, "next", infos))) == MAX_FILES
    infos.keep(tmp_path / "gone")
