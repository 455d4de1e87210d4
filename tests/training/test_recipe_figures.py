"""Recipes for real models state what they take: computed again here, from the published shapes, and compared."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from surgery.architectures.deepseek_v3 import StockMLA
from surgery.architectures.spec import MLASpec
from surgery.bench.shapes import SHAPES
from surgery.common.human import count, duration, size
from surgery.training.estimate import estimate
from surgery.training.settings import HealSettings
from surgery.workflow.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PEAK, UTILISATION, GPUS = 989e12, 0.4, 8
SOURCES = {
    "meta-llama/Meta-Llama-3-8B": SHAPES["llama3-8b"],
    "meta-llama/Llama-2-7b-hf": SHAPES["llama2-7b"],
    "Qwen/Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "vocab_size": 152_064,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
}
RECIPES = sorted((ROOT / "recipes").glob("heal-*.yaml"))
FIGURES = re.compile(r"^#   (\S+)(?: (on 8 GPUs|with lora))?: (.*)$", re.MULTILINE)
ROW = re.compile(r"^\| `(\S+)`(?: (on 8 GPUs|with lora))? \| (.*) \|$", re.MULTILINE)


def config_of(values: dict):
    values = dict(values)
    return CONFIG_MAPPING[values.pop("model_type")](**values)


def student_of(settings: dict) -> dict:
    """The config.json that a conversion would write; its frequencies are some list, as their choice makes them."""
    source = SOURCES[settings["source"]]
    if settings["to"] == "gqa":
        return {**source, "num_key_value_heads": settings["kv_heads"]}
    layers, heads, hidden = (source[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    biased = source["model_type"] == "qwen2"
    frequencies = torch.linspace(1, 0.001, settings["rope_dim"] // 2, dtype=torch.float64)
    spec = MLASpec(
        heads=heads,
        head_dim=hidden // heads,
        value_dim=hidden // heads,
        hidden=hidden,
        ranks=(settings["kv_lora_rank"],) * layers,
        inv_freq=(frequencies,) * layers,
        dtype=torch.bfloat16,
        query_bias=biased,
        latent_bias=biased,
        output_bias=False,
        key_norm_eps=None,
        windows=(None,) * layers,
        input_lengths=(hidden**0.5,) * layers,
    )
    return StockMLA.choose(source, spec).config(source)


def computed(path: Path) -> dict[tuple[str, str], str]:
    """What each healing of a recipe takes, by its step and where it runs, in words."""
    steps = Recipe.read(path).steps
    (convert,) = (step.settings for step in steps if step.verb == "convert")
    student, teacher = config_of(student_of(convert)), config_of(SOURCES[convert["source"]])
    found = {}
    for step in steps:
        if step.verb != "heal":
            continue
        given = {name: value for name, value in step.settings.items() if name not in ("student", "name")}
        settings = HealSettings.from_mapping(given, step.name)
        layerwise = "layerwise" in settings.objective
        node = replace(settings, gradient_accumulation=1, shard_teacher=not layerwise)
        runs = {"": (settings, 1), "on 8 GPUs": (node, GPUS)}
        if not layerwise:
            runs["with lora"] = (replace(settings, train="lora", lora_rank=64, lora_alpha=128.0), 1)
        for where, (asked, processes) in runs.items():
            result = estimate(student, teacher, asked, processes, sharded=processes > 1 and not layerwise)
            time = duration(result.seconds(PEAK, UTILISATION))
            found[step.name, where] = (f"{count(result.tokens)} tokens", size(result.peak_bytes), time)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_figures_are_those_of_the_estimate(path):
    found = computed(path)
    stated = {(name, where): tuple(rest.split(", ")) for name, where, rest in FIGURES.findall(path.read_text("utf-8"))}
    assert stated == found
    rows = ROW.findall((ROOT / "docs" / "healing.md").read_text("utf-8"))
    documented = {(name, where): tuple(rest.split(" | ")) for name, where, rest in rows}
    assert {key: value for key, value in documented.items() if key in found} == found


def test_there_is_a_recipe_for_each_source():
    sources = {
        step.settings["source"] for path in RECIPES for step in Recipe.read(path).steps if step.verb == "convert"
    }
    assert sources == set(SOURCES)
