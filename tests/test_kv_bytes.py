"""KV bytes are predicted in one place: every answer follows it, and live caches are held to it."""

import json
from pathlib import Path

import picture_models
import pytest
import torch
from conversions import convert_checkpoint
from own_checkpoints import HYBRIDS, IN_BITS, SOURCES
from tiny_models import CONFIGS, HELD_OUT
from written_models import IMAGES, WRITTEN

from surgery.architectures.custom_class import layer_entries, own_config
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.common.size_names import with_size_names
from surgery.engines import facts
from surgery.engines.facts import Facts
from surgery.engines.table import diagnose
from surgery.evaluation.dry_run import plan_evaluation
from surgery.evaluation.run import EvaluationRequest
from surgery.evaluation.settings import EvalSettings
from surgery.families import FAMILIES
from surgery.inspection.checks import FAILED, verify_checkpoint
from surgery.inspection.inspect import inspect_checkpoint
from surgery.model import SurgeryConfig
from surgery.model.grouped_entry import GroupedEntry
from surgery.model.latent_entry import NORM_OVER_HEADS
from surgery.model.layer_entry import StockEntry
from surgery.model.parts import entries_of
from surgery.planning.plan import make_plan
from surgery.planning.settings import PlanSettings
from surgery.running import kv_bytes
from surgery.running.kv_bytes import kv_bytes_of
from surgery.structures.dry_run import plan_conversion
from surgery.structures.registry import SLICE, TARGETS

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = {"calibration": "none", "device": "cpu"}
TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 64, "calibration_length": 64, "held_out": 2, "recall": 0.0}
TARGETS_ASKED = {
    "mla": {"kv_ratio": 0.5, "rope_dim": 4},
    "gqa": {"kv_heads": 1},
    "lowrank": {"kv_ratio": 0.5},
    "hybrid": {"streaming": 1, "sinks": 2, "recent": 8, "context": 100},
    "quantized": {"bits": 4},
}


def dumped(config) -> dict:
    """A config as its config.json has it."""
    return with_size_names(json.loads(config.to_json_string(use_diff=False)))


NO_ENTRIES = (IMAGES, "mla", "fewer_heads")
"""Models without entries, and one whose cache has nothing but what its store's rank says."""


def settings_of(target: str):
    return TARGETS[target].settings({**TARGETS_ASKED[target], **WEIGHTS, **(TEXT if target == "quantized" else {})})


@pytest.fixture
def checkpoint_paths(checkpoints, conversions):
    """A source, stock MLA and the custom class; the last two with a report."""
    results = {name: conversions("llama", settings_of(name)).path for name in ("mla", "lowrank")}
    return {"source": checkpoints("llama"), **results}


@pytest.fixture
def one_more(monkeypatch):
    """Makes the prediction wrong by an element of every token and layer, or by a byte of every token."""
    widths, values = kv_bytes.kv_widths, kv_bytes.kv_cache_bytes

    def wrong() -> None:
        for module in (kv_bytes, facts):
            monkeypatch.setattr(module, "kv_widths", lambda config: [width + 1 for width in widths(config)])
        monkeypatch.setattr(
            kv_bytes,
            "kv_cache_bytes",
            lambda config, batch, tokens, *others: values(config, batch, tokens, *others) + batch * tokens,
        )

    return wrong


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_what_the_model_class_holds(name):
    config = dumped(CONFIGS[name]())
    stock, custom = (kv_bytes_of(each, torch.bfloat16) for each in (config, own_config(config, layer_entries(config))))
    for tokens in (1, 10, 17, 5000):
        assert stock(tokens) == custom(tokens) > 0 and stock(tokens, batch=3) == 3 * stock(tokens)


@pytest.mark.parametrize("name", picture_models.CONFIGS)
def test_a_vision_language_model_has_the_cache_of_its_decoder(name):
    source = picture_models.CONFIGS[name]()
    config, text = (json.loads(each.to_json_string(use_diff=False)) for each in (source, source.get_text_config()))
    custom = own_config(text, layer_entries(text))
    whole = {**config, "model_type": "surgery_pictures", "text_config": custom}
    sizes = [kv_bytes_of(each, torch.bfloat16)(40) for each in (config, text, custom, whole)]
    assert sizes[0] > 0 and len(set(sizes)) == 1


def test_kv_heads_by_layer_are_counted():
    config = own_config(dumped(CONFIGS["llama"]()), [StockEntry(), GroupedEntry(kv_heads=1)])
    assert kv_bytes_of(config, torch.float32)(9) == 9 * 3 * 2 * 8 * 4


@pytest.mark.parametrize("name", SOURCES | HYBRIDS | IN_BITS)
def test_the_plugin_allocates_what_the_model_class_holds(name):
    base, entries = (SOURCES | HYBRIDS | IN_BITS)[name]
    config = dumped(SurgeryConfig.from_base(base(), entries))
    result, values = Facts.of(config), kv_bytes_of(config, torch.float32)
    assert result.not_served is None
    assert values(1001) - values(1000) == result.cache(4)["cache_bytes_per_token"]


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in NO_ENTRIES])
def test_one_more_element_of_a_kind_changes_every_answer(name, monkeypatch):
    """The bytes of a kind are those of its entry alone, in the model class, in reports and in the plugin for vLLM."""
    model = WRITTEN[name]()
    config = dumped(model.config)

    def answers():
        engine = Facts.of(config).cache(4).get("cache_bytes_per_token")
        return kv_bytes_of(config, torch.float32)(41), model.kv_cache_bytes(1, 41), engine

    right = answers()
    for kind in {type(entry) for entry in entries_of(model.config)}:
        shape = kind.cached_shape

        def one_more(entry, config, shape=shape):
            heads, key, value = shape(entry, config)
            return heads, key + 1, value

        monkeypatch.setattr(kind, "cached_shape", one_more)
    wrong = answers()
    assert wrong[0] > right[0] and wrong[1] > right[1]
    assert right[2] is None or wrong[2] > right[2]


def answers(checkpoint_paths, tmp_path) -> dict[str, object]:
    """KV bytes by where they are shown."""
    source, mla, own = checkpoint_paths["source"], checkpoint_paths["mla"], checkpoint_paths["lowrank"]
    inspections = {name: inspect_checkpoint(path) for name, path in checkpoint_paths.items()}
    results = {f"inspect {name}": inspection.kv["bytes_per_token"] for name, inspection in inspections.items()}
    results |= {f"inspect {name}, windows": inspection.kv["bytes_at"] for name, inspection in inspections.items()}
    targets = [target for target in inspections["source"].targets if target["applies"]]
    results |= {f"inspect {target['command']}": target["kv_bytes_per_token"] for target in targets}
    for target in TARGETS_ASKED:
        kv = plan_conversion(source, tmp_path / "out", settings_of(target)).kv
        results |= {f"dry run {target}, {name}": kv[name] for name in ("source_bytes_per_token", "bytes_per_token")}
    sliced = SLICE.settings({"kv_ratio": 0.25, **WEIGHTS})
    results["slice"] = plan_conversion(own, tmp_path / "out", sliced).kv["bytes_per_token"]
    for path in (source, mla):
        results[f"doctor {path.name}"] = diagnose(path).verdicts[0].cache_bytes_per_token
    plan = make_plan(source, PlanSettings(kv_ratio=0.7, allow=("quantized",), context="1k", **TEXT))
    results |= {"plan source": plan.source["kv_bytes"], "plan row": min(row.kv_bytes for row in plan.rows)}
    tasks = EvalSettings(tasks="loss", windows=1, length=32, device="cpu")
    request = EvaluationRequest((f"mla={mla}", f"lowrank={own}"), str(source), tmp_path / "eval", tasks)
    results |= {f"eval {row['name']}": row["kv"] for row in plan_evaluation(request, Progress(silent=True)).rows}
    return results


def test_every_answer_follows_the_prediction(checkpoint_paths, one_more, tmp_path):
    right = answers(checkpoint_paths, tmp_path)
    one_more()
    wrong = answers(checkpoint_paths, tmp_path)
    assert right.keys() == wrong.keys() and len(right) > 30
    assert [name for name in right if right[name] == wrong[name]] == []


def test_nothing_else_asks_the_model_class():
    """But what travels with it, and the evaluation of a model that is loaded."""
    apart = [ROOT / "surgery" / each for each in ("model", "eval", "running/kv_bytes.py")]
    files = [file for file in (ROOT / "surgery").rglob("*.py") if not any(file.is_relative_to(each) for each in apart)]
    assert [file for file in files if "kv_cache_bytes(" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("name", ["source", "mla", "lowrank"])
def test_verify_finds_a_wrong_prediction(name, checkpoint_paths, one_more):
    one_more()
    failed = {
        check.name
        for check in verify_checkpoint(checkpoint_paths[name], device="cpu").checks
        if check.outcome == FAILED
    }
    assert failed == {"caches"} | ({"KV bytes"} if name != "source" else set())


@pytest.mark.parametrize("target", [*TARGETS_ASKED, "slice lowrank"])
def test_no_conversion_is_written_by_a_wrong_prediction(target, checkpoint_paths, one_more, tmp_path):
    one_more()
    sliced = target.startswith("slice ")
    settings = SLICE.settings({"kv_ratio": 0.25, **WEIGHTS}) if sliced else settings_of(target)
    with pytest.raises(SurgeryError, match="the live cache takes"):
        convert_checkpoint(checkpoint_paths[target.split()[-1] if sliced else "source"], tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_norms_over_all_heads_are_those_of_their_families():
    """Key gains of a latent are counted by the family's name."""
    assert set(NORM_OVER_HEADS) == {name for name, family in FAMILIES.items() if family.norm_scope == "all"}
