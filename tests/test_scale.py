"""The table of docs/scale.md is what dry runs count on checkpoints of holes."""

import re

import pytest
from command_line import ROOT
from project_tools import tool

scale = tool("scale")

NUMBERS = re.compile(r"[\d,.]+")


def test_files_of_holes_have_the_sizes_of_weights(tmp_path):
    config = scale.SHAPES["llama3-1b"]
    scale.make_hollow(tmp_path / "ckpt", config)
    files = list((tmp_path / "ckpt").glob("*.safetensors"))
    assert len(files) == config["num_hidden_layers"] + 1
    weights = 2 * sum(rows * (columns or [1])[0] for _, (rows, *columns) in scale.weight_shapes(config))
    assert 0 <= sum(file.stat().st_size for file in files) - weights < 64_000
    assert sum(512 * file.stat().st_blocks for file in files) < 2**20


@pytest.mark.slow
def test_the_page_says_what_a_dry_run_counts(tmp_path):
    scale.make_hollow(tmp_path / "llama3-8b", scale.SHAPES["llama3-8b"])
    result = scale.line("llama3-8b", "lowrank", scale.dry_run(tmp_path / "llama3-8b", "lowrank", []))
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    (message,) = [line for line in page.splitlines() if line.startswith("| `llama3-8b` | lowrank |")]
    assert NUMBERS.sub("", message) == NUMBERS.sub("", result)
    for one, other in zip(NUMBERS.findall(message), NUMBERS.findall(result), strict=True):
        # What Python itself takes is in the memory; numbers are rounded.
        assert float(one.replace(",", "")) == pytest.approx(float(other.replace(",", "")), rel=0.05)
