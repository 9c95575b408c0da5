"""`hypercast logs` after a node was killed: which one it was, and its last lines."""

from pathlib import Path

from tests.fixtures.platform import Platform


def test_logs_name_a_killed_node_and_show_what_others_have(tmp_path: Path) -> None:
    platform = Platform(data=tmp_path / "data", flags=("--nodes", "2", "--device", "cpu"))
    platform.up()
    try:
        platform.run("deploy", "builtin:echo", "--name", "echo", "--min-instances", "1")
        (instance,) = platform.until("an instance is ready", lambda: platform.instances("echo"))
        node = instance["node"]
        platform.until("its start is logged", lambda: node in platform.run("logs", "echo").stdout)
        platform.run("invoke", "echo", "-d", '{"message": 1}')
        before = [line for line in platform.run("logs", "echo").stdout.splitlines() if node in line]
        platform.process(node).kill()

        def restarted() -> bool:
            shown = platform.run("logs", "echo").stdout
            return f"{node} | (this node was restarted, " in shown and set(before) <= set(shown.splitlines())

        platform.until("the logs name it, with its lines", restarted)
        assert instance["instance_id"] in (platform.data / "logs" / f"{node}.log").read_text()
    finally:
        platform.down()
