"""The host tier among real processes: one loader a host, eviction within the limit, kill -9 at any time."""

import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from invoker.base.errors import HostTierError, HostTierFull
from invoker.host_tier.folder import USERS, remove_if_unused
from invoker.host_tier.image_writer import ImageWriter, LoadElsewhere
from invoker.host_tier.tier import HostTier
from tests.fixtures.host_tier import digest, fill
from tests.fixtures.patience import PATIENCE_S

OpenTier = Callable[..., HostTier]
KIB = 1024
SPAWN = multiprocessing.get_context("spawn")


def content(name: str, nbytes: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(nbytes)


def is_loading(folder: Path, name: str) -> bool:
    return (folder / f"{digest(name)}.part").exists()


def test_an_image_appears_at_once_and_whole(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(1 << 20)
    writer = tier.begin(digest("a"), 5000)
    assert isinstance(writer, ImageWriter)
    assert not tier.holds(digest("a")) and is_loading(folder, "a")
    assert tier.open(digest("a")) is None
    writer.view[:] = content("a", 5000)
    writer.publish().close()
    assert tier.holds(digest("a")) and not is_loading(folder, "a")
    mapping = tier.open(digest("a"))
    assert mapping is not None and bytes(mapping.view) == content("a", 5000)
    assert mapping.view.readonly
    assert tier.begin(digest("a"), 5000) is None
    mapping.close()
    mapping.close()
    assert "closed" in repr(mapping)


def test_a_load_receives_from_an_open_file(open_tier: OpenTier, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(content("a", 1 << 20))
    tier = open_tier(2 << 20)
    writer = tier.begin(digest("a"), 1 << 20)
    assert isinstance(writer, ImageWriter)
    with (tmp_path / "blob").open("rb") as file:
        assert writer.receive(4096, (1 << 20) - 4096, file.fileno())
        assert writer.receive(0, 4096, file.fileno())
        assert writer.view == content("a", 1 << 20)
        os.truncate(tmp_path / "blob", 8192)
        assert not writer.receive(4096, 8192, file.fileno()), "the file is too short"
    with (tmp_path / "blob").open("ab") as file:
        assert not writer.receive(0, 4096, file.fileno()), "it cannot be read"
    writer.abandon()


def test_an_abandoned_load_leaves_nothing(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(1 << 20)
    writer = tier.begin(digest("a"), 5000)
    assert isinstance(writer, ImageWriter)
    writer.abandon()
    writer.abandon()
    assert tier.used_bytes() == 0 and not is_loading(folder, "a")
    fill(tier, "a", 5000).close()


def test_the_least_recently_used_idle_image_goes_first(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(300 * KIB)
    for age, name in enumerate("abc"):
        fill(tier, name, 100 * KIB).close()
        os.utime(folder / digest(name), (1000.0 + age, 1000.0 + age))
    used = tier.open(digest("a"))
    assert used is not None
    os.utime(folder / digest("a"), (1.0, 1.0))
    fill(tier, "d", 50 * KIB).close()
    assert [tier.holds(digest(name)) for name in "abcd"] == [True, False, True, True]
    assert tier.evictions == 1
    assert not tier.evict(digest("a"))
    used.close()
    assert tier.evict(digest("a")) and not tier.evict(digest("a"))


def test_the_end_of_a_use_is_the_last_use_also_for_other_processes(folder: Path, open_tier: OpenTier) -> None:
    tier, other = open_tier(200 * KIB), open_tier(200 * KIB)
    for age, name in enumerate("ab"):
        fill(tier, name, 100 * KIB).close()
        os.utime(folder / digest(name), (1000.0 + age, 1000.0 + age))
    tier.touch(digest("a"))
    tier.touch(digest("gone"))
    assert [image.digest for image in other.images()] == [digest("b"), digest("a")]
    assert other.images()[1].last_used_at > 1001.0
    fill(other, "c", 100 * KIB).close()
    assert [tier.holds(digest(name)) for name in "abc"] == [True, False, True]


def test_kept_images_go_last_and_not_at_all_for_one_that_yields(folder: Path, open_tier: OpenTier) -> None:
    tier, other = open_tier(300 * KIB), open_tier(300 * KIB)
    for age, name in enumerate("abc"):
        fill(tier, name, 100 * KIB).close()
        os.utime(folder / digest(name), (1000.0 + age, 1000.0 + age))
    assert other.keep(digest("a")) and tier.keep(digest("b")) and not tier.keep(digest("z"))
    assert [image.kept for image in tier.images()] == [True, True, False]
    assert tier.used_bytes() == 300 * KIB
    fill(tier, "d", 100 * KIB).close()
    assert [tier.holds(digest(name)) for name in "abcd"] == [True, True, False, True]
    assert tier.keep(digest("d"))
    with pytest.raises(HostTierFull, match="or retained"):
        tier.begin(digest("e"), 100 * KIB, yielding=True)
    os.utime(folder / digest("d"), (1.0, 1.0))
    tier.unkeep(digest("b"))
    fill(tier, "e", 100 * KIB).close()  # b was used later than d, but is not kept any more
    assert [tier.holds(digest(name)) for name in "abde"] == [True, False, True, True]
    assert tier.keep(digest("e"))
    fill(tier, "f", 100 * KIB).close()  # a last resort
    assert [tier.holds(digest(name)) for name in "adef"] == [True, False, True, True]
    assert tier.evict(digest("a"))
    fill(tier, "a", 100 * KIB).close()
    assert [image.kept for image in tier.images() if image.digest == digest("a")] == [False]


def test_what_killed_processes_left_goes_when_a_tier_of_their_cluster_opens(
    folder: Path, open_tier: OpenTier
) -> None:
    live = HostTier(folder.parent.with_name(folder.parent.name + "-other") / "h0", 1 << 20)
    fill(live, "a", 100).close()
    beside = folder.with_name("h1")
    with start_loader(folder, "a") as one, start_loader(beside, "a") as two:
        for process in (one, two):
            process.kill()
            process.wait()
    for where in (folder, beside):
        assert (where / f"{digest('a')}.part").exists()
    (folder / digest("whole")).write_bytes(b"checked when it came")
    tier = open_tier(1 << 20)
    assert not beside.exists()
    assert tier.holds(digest("whole")) and is_loading(folder, "a"), "who loads it goes on with it"
    assert live.holds(digest("a"))
    with start_loader(beside, "b") as process:
        HostTier(folder, 1 << 20).close()
        assert (beside / f"{digest('b')}.part").exists()
        process.kill()
        process.wait()
    tier.close()
    live.close()


def test_what_cannot_fit_evicts_nothing(open_tier: OpenTier) -> None:
    tier = open_tier(1000 * KIB)
    used = fill(tier, "a", 600 * KIB)
    for name in "bcd":
        fill(tier, name, 100 * KIB).close()
    assert tier.keep(digest("b"))
    with pytest.raises(HostTierFull, match=f"{600 * KIB} are in use"):
        tier.begin(digest("e"), 500 * KIB)
    assert all(tier.holds(digest(name)) for name in "abcd") and tier.evictions == 0
    assert tier.evict(digest("c")), "no lock is held on what stayed"
    used.close()
    fill(tier, "e", 500 * KIB).close()
    assert tier.holds(digest("b"))


def test_a_late_sweep_leaves_a_tier_that_is_in_use_again(folder: Path, open_tier: OpenTier) -> None:
    with start_loader(folder, "a") as process:
        process.kill()
        process.wait()
    late = os.open(folder / USERS, os.O_RDWR)  # what a sweep holds that was overtaken before its lock
    sweeper = HostTier(folder.with_name("h1"), 1 << 20)
    assert not folder.exists()
    tier = open_tier(1 << 20)
    fill(tier, "b", 100).close()
    remove_if_unused(folder, late)
    assert tier.holds(digest("b"))
    fill(tier, "c", 100).close()
    tier.close()
    sweeper.close()


def test_what_cannot_fit_is_refused_with_numbers(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(100 * KIB)
    with pytest.raises(HostTierFull, match="raise --host-memory"):
        tier.begin(digest("big"), 101 * KIB)
    kept = fill(tier, "a", 60 * KIB)
    with pytest.raises(HostTierFull, match="61440 are in use"):
        tier.begin(digest("b"), 60 * KIB)
    assert not is_loading(folder, "b")
    kept.close()
    fill(tier, "b", 60 * KIB).close()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(HostTierError, match="belongs to another user"):
        HostTier(tmp_path / "link", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(HostTierError, match="cannot use"):
        HostTier(tmp_path / "file" / "h0", 1)


def test_the_folder_stays_until_its_last_user_leaves(folder: Path, open_tier: OpenTier) -> None:
    first, second = open_tier(1 << 20), open_tier(1 << 20)
    fill(first, "a", 100).close()
    first.close()
    assert second.holds(digest("a"))
    second.close()
    second.close()
    assert not folder.exists()


LOADER = """
import sys
from pathlib import Path
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
tier = HostTier(Path(sys.argv[1]), 1 << 20)
writer = tier.begin(sys.argv[2], 400 * 1024)
assert isinstance(writer, ImageWriter)
writer.view[:] = b"x" * len(writer.view)
print("loading", flush=True)
if sys.stdin.readline().strip() == "publish":
    writer.publish()
    print("published", flush=True)
    sys.stdin.readline()
"""


def start_loader(folder: Path, name: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOADER), str(folder), digest(name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    return process


def test_others_wait_for_the_one_that_loads(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(1 << 20)
    with start_loader(folder, "a") as process:
        elsewhere = tier.begin(digest("a"), 400 * KIB)
        assert isinstance(elsewhere, LoadElsewhere)
        process.stdin.write("publish\n")
        process.stdin.flush()
        tier.wait(elsewhere)
        mapping = tier.open(digest("a"))
        assert mapping is not None and mapping.view[0] == ord("x")
        mapping.close()
        assert not tier.evict(digest("a"))
        process.kill()
        process.wait()
    assert tier.evict(digest("a"))


def test_a_killed_load_is_taken_over(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(1 << 20)
    with start_loader(folder, "a") as process:
        elsewhere = tier.begin(digest("a"), 400 * KIB)
        assert isinstance(elsewhere, LoadElsewhere)
        process.send_signal(signal.SIGKILL)
        process.wait()
        tier.wait(elsewhere)
    assert is_loading(folder, "a")
    writer = tier.begin(digest("a"), 400 * KIB)
    assert isinstance(writer, ImageWriter) and writer.is_resumed
    assert list(writer.extents()) == [(0, 400 * KIB)] and bytes(writer.view[:16]) == b"x" * 16
    writer.abandon()
    assert not is_loading(folder, "a")


def test_a_killed_load_of_another_size_starts_again(folder: Path, open_tier: OpenTier) -> None:
    with start_loader(folder, "a") as process:
        process.kill()
        process.wait()
    tier = open_tier(1 << 20)
    writer = tier.begin(digest("a"), 500 * KIB)
    assert isinstance(writer, ImageWriter) and not writer.is_resumed and not list(writer.extents())
    writer.view[300 * KIB] = 1
    assert list(writer.extents()) == [(300 * KIB, 304 * KIB)]
    writer.abandon()


def test_the_room_of_a_killed_load_is_taken_back(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(500 * KIB)
    with start_loader(folder, "a") as process:
        with pytest.raises(HostTierFull):
            tier.begin(digest("b"), 400 * KIB)
        process.kill()
        process.wait()
    fill(tier, "b", 400 * KIB).close()
    assert not is_loading(folder, "a")


SIZE = 40 * KIB
LIMIT = 3 * SIZE


def stress(folder: Path, seed: int, rounds: int, queue) -> None:
    """Use random images again and again, loading what is missing; die in the middle of a load at times."""
    draw = random.Random(seed)
    tier = HostTier(folder, LIMIT)
    done = 0
    while done < rounds:
        name = draw.choice("abcdef")
        mapping = tier.open(digest(name))
        if mapping is None:
            try:
                got = tier.begin(digest(name), SIZE)
            except HostTierFull:
                continue
            if isinstance(got, LoadElsewhere):
                tier.wait(got)
            elif got is not None:
                half = SIZE // 2
                got.view[:half] = content(name, SIZE)[:half]
                if draw.random() < 0.1:
                    os.kill(os.getpid(), signal.SIGKILL)
                got.view[half:] = content(name, SIZE)[half:]
                got.publish().close()
            continue
        assert bytes(mapping.view) == content(name, SIZE), f"{name} is damaged"
        assert tier.used_bytes() <= LIMIT
        mapping.close()
        done += 1
    tier.close()
    queue.put(seed)


def test_processes_that_die_at_any_time_damage_nothing(folder: Path, open_tier: OpenTier) -> None:
    keeper = open_tier(LIMIT)
    queue = SPAWN.SimpleQueue()
    workers = [SPAWN.Process(target=stress, args=(folder, seed, 60, queue)) for seed in range(5)]
    for worker in workers:
        worker.start()
    survivors = 0
    for worker in workers:
        worker.join(PATIENCE_S)
        assert worker.exitcode in (0, -signal.SIGKILL), worker.exitcode
        survivors += worker.exitcode == 0
    assert sum(1 for _ in iter(lambda: None if queue.empty() else queue.get(), None)) == survivors
    assert keeper.used_bytes() <= LIMIT
    for name in "abcdef":
        mapping = keeper.open(digest(name))
        if mapping is not None:
            assert bytes(mapping.view) == content(name, SIZE)
            mapping.close()
    keeper.close()
    assert not folder.exists()
