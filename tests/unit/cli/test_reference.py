"""The generated reference has every command, option, operation, setting and metric of the code."""

import html
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.contexts import Config, Context
from cli.reference.command_line import every_command, visible_options
from cli.reference.http_api import every_operation, openapi
from cli.reference.markdown import anchor, cell, code, prose
from cli.reference.metrics import every_metric
from cli.reference.pages import PAGES, write_pages
from gateway.api.operations import OPERATIONS
from registry.config.function_yaml import keys_of_file
from registry.config.function_yaml_help import FUNCTION_YAML_HELP
from registry.config.options import FLAGS
from tests.fixtures.gateway_http import byte_tokenizer, gateway

ROOT = Path(__file__).resolve().parents[3]

_CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`|<code>.*?</code>", re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reference")
    write_pages(folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


def sections(page: str) -> dict[str, str]:
    """Return the text of each section by its heading."""
    parts = re.split(r"^#{2,3} (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> dict[str, str]:
    """Return the rows of a section's tables by the code in their first cell."""
    found = re.finditer(r"^\| (?:`|<code>)(.+?)(?:`|</code>) .*$", text, re.MULTILINE)
    return {html.unescape(match[1]): match[0] for match in found}


def test_every_command_is_there_with_its_options_and_defaults(pages: dict[str, str]) -> None:
    found = sections(pages["CLI.md"])
    commands = list(every_command())
    assert {"hypercast up", "hypercast gateway", "hypercast usage bill", "hypercast context use"} <= {
        path for path, _, _ in commands
    }
    for path, command, context in commands:
        options = rows(found[path])
        for option in visible_options(command):
            record = option.get_help_record(context)
            assert record is not None
            row = options[record[0]]
            for default in re.findall(r"\[default: ([^\]]*)\]", record[1]):
                assert cell(prose(default)) in row
    assert "hypercast up --nodes 3 --hosts 3" in found["hypercast up"]  # an example of its help
    assert "| 8000 |" in rows(found["hypercast up"])["--port PORT"]
    assert "`HYPERCAST_URL`" in rows(found["hypercast list"])["--url TEXT"]


def test_every_operation_is_there_with_what_it_takes_and_gives(pages: dict[str, str]) -> None:
    found = sections(pages["HTTP-OPERATIONS.md"])
    assert {f"{op.method.upper()} {op.path}" for op in OPERATIONS} <= set(found)
    for path, method, operation in every_operation():
        text = found[f"{method} {path}"]
        assert prose(operation["summary"]) in text
        named = [one["name"] for one in operation["parameters"] if "name" in one]
        assert set(named) == set(rows(text))
        assert all(f"[{status}]" in text or f"`{status}`" in text for status in operation["responses"])
    chat = found["POST /v1/chat/completions"]
    assert "[ChatRequest](HTTP-TYPES.md#chatrequest)" in chat and "text/event-stream" in chat


def test_every_type_is_there_with_its_fields(pages: dict[str, str]) -> None:
    found = sections(pages["HTTP-TYPES.md"])
    for name, schema in openapi()["components"]["schemas"].items():
        assert set(schema.get("properties", ())) == set(rows(found[name])), name
    assert "number (≥ 0, ≤ 2) or null" in rows(found["CompletionRequest"])["temperature"]


def test_every_setting_is_there_with_its_default(pages: dict[str, str]) -> None:
    found = sections(pages["SETTINGS.md"])
    assert set(rows(found["Processes"])) == {flag.name for flag in FLAGS.values()}
    assert "up: 8000; gateway: 8080" in rows(found["Processes"])["--port"]
    keys = [key for key, _ in keys_of_file()]
    assert set(rows(found["function.yaml"])) == set(keys) == set(FUNCTION_YAML_HELP)
    assert "| duration | 1m |" in rows(found["function.yaml"])["scaling.keep_alive"]
    assert "| size | 1.0 GiB |" in rows(found["function.yaml"])["limits.memory"]
    config = found["The configuration file"]
    assert all(f"{name} =" in config for name in (*Context.__struct_fields__, "current"))
    assert set(Config.__struct_fields__) == {*Context.__struct_fields__, "current", "contexts"}


def test_every_metric_is_there_with_its_labels(pages: dict[str, str]) -> None:
    found = rows(pages["METRICS.md"])
    metrics = list(every_metric())
    assert len(metrics) > 40
    for metric in metrics:
        row = found[f"{metric.name}_total" if metric.kind == "counter" else metric.name]
        assert f"| {metric.kind} |" in row and all(code(label) in row for label in metric.labels)
        assert prose(metric.text) in row
    assert "`function`, `version`, `start_kind`, `code`" in found["hypercast_requests_total"]


def test_every_variable_of_the_environment_is_there(pages: dict[str, str]) -> None:
    named = {
        name
        for package in ("cli", "gateway", "invoker", "registry", "rdmacast")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"\bHYPERCAST_[A-Z_]+[A-Z]\b", path.read_text())
    }
    assert len(named) > 4
    assert named == set(rows(sections(pages["SETTINGS.md"])["Environment"]))


async def test_labels_are_those_of_what_a_gateway_exports() -> None:
    async with gateway(vllm_metrics=True, tenant_metrics=1) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        async with gw.http() as http:
            done = await http.post("/v1/completions", json={"model": "coder", "prompt": [1], "max_tokens": 5})
            assert done.status_code == 200
            text = (await http.get("/metrics")).text
    known = {metric.name: set(metric.labels) for metric in every_metric()}
    found = {
        family.name: set(sample.labels) - {"le"}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert len(found) > 25
    assert {name: known[name] for name in found} == found


def test_links_between_the_pages_lead_somewhere(pages: dict[str, str]) -> None:
    anchors = {name: {anchor(heading) for heading in sections(text)} for name, text in pages.items()}
    for name, text in pages.items():
        for target, place in set(_LINK.findall(_CODE.sub("", text))):
            page = target or name
            if page in pages:
                assert not place or place in anchors[page], f"{name} links to {target}#{place}"
            else:
                assert (ROOT / "reference" / target).resolve().exists(), f"{name} links to {target}"


def test_a_page_that_is_the_same_is_not_written_again(tmp_path: Path) -> None:
    write_pages(tmp_path)
    (tmp_path / "METRICS.md").write_text("old")
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in PAGES}
    write_pages(tmp_path)
    after = {name: (tmp_path / name).stat().st_mtime_ns for name in PAGES}
    assert {name for name in PAGES if before[name] != after[name]} == {"METRICS.md"}
