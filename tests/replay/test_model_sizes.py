"""``--model``: the layers and groups of each model in vLLM, and one line for each wrong file."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvview.cli.commands import cli
from kvview.errors import ConfigError
from kvview_reference.replay.workload import generate_trace
from kvview_reference.sizing.cache_plan import plan_cache
from kvview_reference.sizing.model import LayerSet, ModelShape, attention_layers
from kvview_reference.sizing.model_config import read_config
from kvview_reference.sizing.model_facts import FACTS
from kvview_reference.sizing.model_file import read_model
from kvview_reference.sizing.references import read_references
from kvview_reference.sizing.stored import LARGEST_GPU_GB, StoredBlocks
from kvview_reference.sizing.sweep import SizeReport

HERE = Path(__file__).parent
CONFIGS: dict[str, dict[str, Any]] = json.loads((HERE / "model_configs.json").read_text())
"""Fields of published files (see ``tests/vllm/model_specs.py``)."""
PINNED: dict[str, dict[str, Any]] = json.loads((HERE / "model_specs.json").read_text())
"""The specifications of vLLM 0.32.0 on a CPU, from ``python tests/vllm/model_specs.py --write``."""

CPU_BLOCKS = (128, 32)
"""Tokens of a block of vLLM on a CPU, and of the blocks of its kernels."""
LATENT_BLOCKS = (16, 16)


def _read(name: str) -> ModelShape:
    name, _, tp = name.partition(", tp ")
    return read_config(CONFIGS[name], name, None, int(tp or 1))


# --- the specifications of vLLM ---


def test_every_config_is_pinned() -> None:
    assert {name.partition(", tp ")[0] for name in PINNED} == set(CONFIGS)


@pytest.mark.parametrize("name", PINNED)
def test_layers_are_those_of_vllm(name: str) -> None:
    model = _read(name)
    found = [
        [layers.count, layers.kind, layers.tokens, layers.token_bytes or layers.state_bytes]
        for layers in model.layers
    ]
    layers = PINNED[name]["layers"]
    assert sorted(found, key=str) == sorted(layers, key=str)
    num_bytes = sum(count * size for count, kind, _, size in layers if kind == "full")
    assert model.tp > 1 or model.token_bytes == num_bytes


@pytest.mark.parametrize("name", PINNED)
def test_groups_are_those_of_vllm(name: str) -> None:
    model, pinned = _read(name), PINNED[name]
    plan = plan_cache(model, *(LATENT_BLOCKS if model.layers[0].is_latent else CPU_BLOCKS))
    found = Counter((group.count, group.block_size, group.page_bytes) for group in plan.groups)
    assert found == Counter(map(tuple, pinned["groups"]))
    assert (plan.block_size, plan.block_bytes) == (pinned["block_size"], pinned["block_bytes"])


ALSO: dict[str, dict[str, Any]] = json.loads((HERE / "model_fields.json").read_text())
"""Further fields of published files, none of which changes the cache."""


@pytest.mark.parametrize(("name", "fields"), ALSO.items())
def test_fields_that_change_nothing(name: str, fields: dict[str, Any]) -> None:
    assert read_config(CONFIGS[name] | fields, name, None, 1).layers == _read(name).layers


# --- the bytes of the host ---


def test_the_total_of_a_host_that_holds_the_whole_trace() -> None:
    """The mean of a block times the blocks is the sum counted with a set for each kind."""
    rows, size = list(generate_trace(num_requests=300, seed=3)), 512
    model = ModelShape(
        (
            attention_layers("full", 2, 2, 64),
            attention_layers("window", 4, 2, 64, tokens=1500),
            LayerSet("state", 4, 0, 300_000, None, "a state"),
        )
    )
    blocks = StoredBlocks(model, size)
    references = read_references(rows, size, tails=blocks.tails)
    plan = blocks.plan
    full: set[int] = set()
    window: set[int] = set()
    ends: set[int] = set()
    for row in rows:
        ids = row.hash_ids[: row.num_prompt_tokens // size]
        full.update(ids)
        window.update(ids[-3:])
        last = len(ids) * size // plan.block_size * plan.block_size // size
        ends.update(ids[max(0, last - 1) : last])
    total = len(ends) * plan.state_bytes()
    total += int(plan.token_bytes("full") * len(full) * size)
    total += int(plan.token_bytes("window") * len(window) * size)
    mean = blocks.block_bytes(references.tail_shares)
    assert mean * len(full) == pytest.approx(total, abs=len(full))  # rounded up by a byte each
    assert blocks.dense_block_bytes(references.tail_shares) > mean


def test_a_model_without_windows_stores_its_tokens() -> None:
    blocks = StoredBlocks(_read("Llama 3.1 8B"), 512)
    assert not blocks.tails
    assert blocks.block_bytes(()) == blocks.dense_block_bytes(()) == 512 * 131_072
    assert blocks.load_bytes(3) == 3 * 512 * 131_072


def test_a_load_moves_windows_and_states_once() -> None:
    blocks = StoredBlocks(_read("Qwen3-Next 80B"), 512)
    one, two = blocks.load_bytes(1), blocks.load_bytes(2)
    assert two - one == 512 * 24_576
    assert one - (two - one) == blocks.plan.state_bytes()


def test_the_page_lists_the_model_types() -> None:
    page = (HERE.parents[1] / "docs" / "sizing.md").read_text()
    listed = page.partition("supports these model types")[2].partition("of any other type")[0]
    types = {name.removesuffix("_text").removesuffix("_moe") for name in FACTS}
    assert set(re.findall(r"`([a-z0-9_]+)`", listed)) == types


# --- the commands ---


def run(command: str, *args: object) -> Result:
    return CliRunner().invoke(cli, [command, *map(str, args)])


def _file(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", ["Qwen3-Next 80B", "Gemma 3 27B", "Mistral 7B v0.1"])
def test_size_of_a_hybrid_model(name: str, tmp_path: Path) -> None:
    path, out = _file(tmp_path, CONFIGS[name]), tmp_path / "r.json"
    options = ["--requests=200", "--sizes=1GiB,100%", "--gpu-blocks=64GiB", "--policies=lru"]
    result = run("size", "--model", path, *options, "--json", out)
    assert result.exit_code == 0, result.output
    assert "Hybrid model:" in result.output
    report = SizeReport.model_validate_json(out.read_text())
    assert report.model is not None
    assert report.model.token_bytes == _read(name).token_bytes
    assert report.gpu_gib == pytest.approx(64, rel=0.01)
    shares = {part.kind: part.stored_share for part in report.model.layers}
    assert shares.get("full", 1.0) == 1.0
    assert all(0 < share < 1 for kind, share in shares.items() if kind != "full")
    assert report.model.block_bytes == pytest.approx(
        sum(part.stored_share * part.stored_block_bytes for part in report.model.layers), abs=1
    )


@pytest.mark.parametrize(
    ("name", "options", "is_too_large"),
    [
        ("Llama 3.1 70B", [], True),
        ("Llama 3.1 70B", ["--tp=8"], False),
        ("Llama 3.1 70B", ["--gpu-blocks=40GiB"], False),
        ("Llama 3.1 70B", ["--gpu-blocks=400GiB"], True),
        ("Llama 3.1 8B", [], False),
    ],
)
def test_a_gpu_cache_that_no_gpu_has(
    name: str, options: list[str], is_too_large: bool, tmp_path: Path
) -> None:
    path, out = _file(tmp_path, CONFIGS[name]), tmp_path / "r.json"
    result = run("size", "--requests=100", "--model", path, "--json", out, *options)
    assert result.exit_code == 0, result.output
    report = SizeReport.model_validate_json(out.read_text())
    warning = f"more than any GPU has ({LARGEST_GPU_GB} GB at most)"
    assert (warning in result.output) is is_too_large
    assert any(warning in note for note in report.notes) is is_too_large
    assert f"({report.gpu_gib:,.1f} GiB) alone" in result.output


def test_replay_has_the_groups_of_the_model(tmp_path: Path) -> None:
    path, out = _file(tmp_path, CONFIGS["Gemma 3 27B"]), tmp_path / "r.json"
    options = ["--requests=20", "--option=cpu_blocks=100", "--json", out]
    assert run("replay", "--model", path, *options).exit_code == 0
    times = json.loads(out.read_text())["time"]
    assert times["token_bytes"] == 62 * 8192
    assert times["group_bytes"] == [10 * 8192 * 512, 52 * 8192 * 512]
    result = run("replay", "--model", path, "--groups", "window:1024,full@2", *options)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["time"]["group_bytes"] == [52 * 8192 * 512, 20 * 8192 * 512]


# --- wrong files ---

LLAMA = CONFIGS["Llama 3.1 8B"]
JAMBA = CONFIGS["Jamba v0.1"]
WRONG = [0, -1, 1.5, "8", "", True, [], [1], {}, {"a": 1}, 10**400, float("nan"), float("inf")]


def _places(config: dict[str, Any]) -> Iterator[list[str]]:
    for name, value in config.items():
        yield [name]
        if isinstance(value, dict):
            yield from ([name, *rest] for rest in _places(value))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_wrong_value_is_refused_or_ignored(name: str) -> None:
    num_refused = 0
    for place in _places(CONFIGS[name]):
        for wrong in [*WRONG, None]:
            config = copy.deepcopy(CONFIGS[name])
            inner = config
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = wrong
            for tp in (1, 3):
                try:
                    StoredBlocks(read_config(config, "--model 'x'", None, tp), 16)
                except ConfigError:
                    num_refused += 1
    assert num_refused > len(WRONG)


@pytest.mark.parametrize("field", ["sliding_window", "window_size", "kv_lora_rank", "block_types"])
def test_an_unknown_model_type(field: str) -> None:
    plain = {name: value for name, value in LLAMA.items() if name != "model_type"}
    new = plain | {"model_type": "newest", "rope_theta": 1e6, "num_experts": 64}
    assert read_config(new, "x", None, 1).token_bytes == 131_072
    if field == "sliding_window":
        (layers,) = read_config(new | {field: 4096}, "x", None, 1).layers
        assert (layers.kind, layers.tokens) == ("window", 4096)
    else:
        with pytest.raises(ConfigError, match=f"{field} is an unknown field"):
            read_config(new | {field: [1]}, "x", None, 1)


def test_layers_written_by_hand(tmp_path: Path) -> None:
    groups = [
        {"kind": "state", "layers": 36, "state_bytes": 1_097_728},
        {"kind": "full", "layers": 12, "kv_heads": 2, "head_size": 256},
    ]
    path = str(_file(tmp_path, {"groups": groups, "name": "mine"}))
    model = read_model(path, tp=2)
    assert (model.token_bytes, model.state_bytes) == (24_576, 36 * 1_097_728)
    assert plan_cache(model).block_bytes * 2 == plan_cache(_read("Qwen3-Next 80B")).block_bytes
    with pytest.raises(ConfigError, match="state_bytes"):
        read_model(path, tp=3)


def test_a_quantised_cache(tmp_path: Path) -> None:
    path = str(_file(tmp_path, LLAMA))
    sizes = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float32": 4, "nvfp4": 9 / 16}
    for dtype, size in sizes.items():
        model = read_model(path, dtype)
        assert model.token_bytes == 131_072 / 2 * size
    # The state keeps the type of the model.
    whole = read_model(str(_file(tmp_path, JAMBA)))
    packed = read_model(str(_file(tmp_path, JAMBA)), "fp8")
    assert packed.state_bytes == whole.state_bytes
