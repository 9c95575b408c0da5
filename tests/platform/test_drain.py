"""`hypercast drain` under calls, and settings changed meanwhile: no call fails."""

import threading
from pathlib import Path

from tests.fixtures.platform import Platform


def test_a_drained_node_loses_its_instances_and_no_call(tmp_path: Path) -> None:
    platform = Platform(data=tmp_path / "data", flags=("--nodes", "2", "--device", "cpu"))
    platform.up()
    try:
        platform.run("deploy", "builtin:echo", "--name", "echo", "--min-instances", "1")
        (instance,) = platform.until("an instance is ready", lambda: platform.instances("echo"))
        first = instance["node"]
        (second,) = {node["id"] for node in platform.nodes()} - {first}
        statuses, ended = list[int](), threading.Event()

        def call() -> None:
            with platform.http() as http:
                while not ended.is_set():
                    statuses.append(http.post("/functions/echo/invoke", json={"message": 1}).status_code)

        caller = threading.Thread(target=call)
        caller.start()
        try:
            platform.until("calls are served", lambda: len(statuses) > 20)
            drained = platform.json("drain", first)
            assert drained == {"node": first, "instances": []}
            assert {one["node"] for one in platform.instances("echo")} == {second}
            set_to = platform.json("set", "echo", "keep-alive=5m", "max-instances=all")
            assert set_to["scaling"]["keep_alive_s"] == 300 and set_to["scaling"]["min_instances"] == 1
            there = len(statuses)
            platform.until("calls are served by the other node", lambda: len(statuses) > there + 20)
        finally:
            ended.set()
            caller.join()
        assert set(statuses) == {200}
        states = {line.split()[0]: line for line in platform.run("nodes").stdout.splitlines()[1:]}
        assert "cordoned" in states[first] and "cordoned" not in states[second]
        refused = platform.run("drain", second, check=False)
        assert refused.returncode == 1 and "no other node" in refused.stderr
        assert {one["node"] for one in platform.instances("echo")} == {second}
        platform.run("uncordon", second)
        platform.run("uncordon", first)
        platform.run("scale", "echo", "--instances", "2")
        assert {one["node"] for one in platform.instances("echo")} == {first, second}
        changed = [one["operation"] for one in platform.json("audit")]
        assert {"node.drain", "node.uncordon"} <= set(changed)
    finally:
        platform.down()
