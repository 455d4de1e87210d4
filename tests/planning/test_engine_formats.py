"""Cache formats that engines have without a conversion, as candidates of a plan."""

import json

import pytest
import torch
from command_line import run_main
from tiny_models import HELD_OUT, SHAPE, add_tokenizer, random_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from surgery.calibration.texts import load_texts
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.engines.cache_formats import CACHE_FORMATS, cache_formats
from surgery.eval.kv_cache import cache_bytes
from surgery.eval.variants.coded_cache import CodedLayer, coded_cache
from surgery.eval.variants.engine_cache import FORMATS, engine_cache
from surgery.families import any_family_of
from surgery.planning.engine_formats import engine_formats
from surgery.planning.measure import measure
from surgery.planning.plan import make_plan, open_work
from surgery.planning.plan_file import read_plan, write_plan
from surgery.planning.settings import PlanSettings
from surgery.running.source import Source
from surgery.running.unfused import open_model

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 4, "recall": 0.0}
TEXT |= {"context": "64", "batch": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Llama with heads of 32 channels, which every format holds."""
    folder = tmp_path_factory.mktemp("engines") / "llama"
    random_model(LlamaConfig(**{**SHAPE, "head_dim": 32, "num_hidden_layers": 5}), 0).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def scores(source, engine):
    """Candidates of an engine by name, their loss increases and the held-out text."""
    settings, quiet = PlanSettings(engine=engine, allow=("engine",), **TEXT), Progress(silent=True)
    opened, refused = Source.open(source, settings), {}
    texts = load_texts(opened, settings, quiet, planted=False)
    with open_work(opened, settings, texts, quiet) as work:
        candidates = engine_formats(opened, settings, "ckpt", refused)
        scored = measure(candidates, work, texts.held_out).scored
    assert not refused
    return candidates, scored, texts.held_out.tokens[: texts.held_out.texts]


def losses(model, tokens):
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(1).tolist()


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_a_format_is_measured_as_evaluation_measures_it(source, engine):
    candidates, scored, tokens = scores(source, engine)
    for each, score in zip(candidates, scored, strict=True):
        model = AutoModelForCausalLM.from_pretrained(source).eval()
        if each.format.keys != each.format.values:
            coded_cache(model, "by hand", [CodedLayer(part.key_coder, part.value_coder) for part in each.layers])
        else:
            engine_cache(model, each.format.name)
        differences = sorted(abs(own - other) for own, other in zip(score.losses, losses(model, tokens), strict=True))
        # Rounding decides a code at the edge between two, of which this random model makes much.
        assert differences[len(differences) // 2] < 5e-4 and differences[-1] < 5e-3, each.name
        values = model(tokens[:2, :64]).past_key_values
        assert each.kv_bytes == cache_bytes(values), each.name


def test_what_needs_no_surgery_is_said_and_converts_to_nothing(source, tmp_path, monkeypatch, capsys):
    text = [f"--{name.replace('_', '-')}={value}" for name, value in TEXT.items()]
    out = tmp_path / "plan.yaml"
    arguments = ["plan", source, "--kv-ratio", "0.5", "--engine", "vllm", "--allow", "engine", *text, "--out", out]
    code, printed, error = run_main(monkeypatch, capsys, *arguments, "--json")
    assert code == 0, error
    plan = json.loads(printed)
    assert {row["engine"] for row in plan["rows"]} == {"vllm"} and {row["to"] for row in plan["rows"]} == {None}
    selection = plan["rows"][plan["choice"]]
    assert selection["command"].startswith("vllm serve") and selection["kv_ratio"] <= 0.5
    code, _, error = run_main(monkeypatch, capsys, "convert", source, "--plan", out, "--out", tmp_path / "converted")
    assert code == 1 and not (tmp_path / "converted").exists()
    with pytest.raises(SurgeryError) as message:
        read_plan(out)
    assert message.value.path == out and selection["command"] in str(message.value)


def test_formats_stand_next_to_conversions(source, tmp_path):
    settings = PlanSettings(kv_ratio=0.3, engine="llama.cpp", allow=("mla", "gqa", "engine"), **TEXT)
    plan = make_plan(source, settings, called="ckpt")
    assert {row.engine for row in plan.rows} == {None, "llama.cpp"}
    assert plan.own_format is None or plan.own_format.kv_ratio <= 0.3
    conversions = make_plan(source, PlanSettings(**{**settings.to_dict(), "allow": ("mla", "gqa")}), called="ckpt")
    with_formats, alone = ({row.name: row.by_text[0] for row in each.rows} for each in (plan, conversions))
    shared = with_formats.keys() & alone.keys()
    assert shared and all(with_formats[name] == alone[name] for name in shared) and conversions.own_format is None
    assert all(row.engine is None for row in conversions.rows)
    write_plan(conversions, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").target.name == conversions.chosen.to


@pytest.mark.parametrize("engine", [None, "mlx", "all"])
def test_engines_without_a_format_are_refused(engine):
    with pytest.raises(SurgeryError) as message:
        PlanSettings(engine=engine, allow=("engine",))
    assert message.value.setting == "engine"
    if engine:
        with pytest.raises(SurgeryError):
            cache_formats(engine)


def test_layers_with_a_window_keep_full_precision(tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    windows = {"layer_types": kinds, "sliding_window": 16, "use_sliding_window": True}
    random_model(Qwen2Config(**{**SHAPE, "head_dim": 32}, **windows), 0).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    settings, quiet, refused = PlanSettings(engine="vllm", allow=("engine",), **TEXT), Progress(silent=True), {}
    opened = Source.open(tmp_path, settings)
    texts = load_texts(opened, settings, quiet, planted=False)
    with open_work(opened, settings, texts, quiet) as work:
        candidate = engine_formats(opened, settings, "ckpt", refused)[0]
        score = measure([candidate], work, texts.held_out).scored[0]
    assert not refused and candidate.leaves(1) and not candidate.leaves(0)
    assert candidate.command("ckpt").endswith("--kv-cache-dtype-skip-layers sliding_window")
    model = engine_cache(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), candidate.format.name)
    tokens = texts.held_out.tokens[: texts.held_out.texts]
    assert score.losses == pytest.approx(losses(model, tokens), abs=5e-3)
    assert candidate.kv_bytes == cache_bytes(model(tokens[:2, :64]).past_key_values)
    settings = PlanSettings(engine="llama.cpp", allow=("engine",), **TEXT)
    assert engine_formats(Source.open(tmp_path, settings), settings, "ckpt", refused) == [] and len(refused) == 6


@pytest.mark.parametrize("family", ["mistral_window", "deepseek_v3"])
def test_sources_that_formats_do_not_hold_are_refused(checkpoints, family):
    settings, refused, reader = PlanSettings(engine="vllm", **TEXT), {}, open_model(checkpoints(family))
    assert engine_formats(Source.of(reader, settings, any_family_of(reader.config)), settings, "ckpt", refused) == []
    assert set(refused) == {"vllm's own cache"}


def test_formats_are_those_that_evaluation_has():
    formats = [each for formats in CACHE_FORMATS.values() for each in formats]
    assert {name for each in formats for name in (each.keys, each.values)} <= set(FORMATS)
