"""Engines: the table of what they load, and conversions that respect their limits."""

import json
import shutil

import pytest
import torch
from command_line import run_main
from config_files import edit_config
from conversions import convert_checkpoint
from gguf_files import make_model, write_gguf
from tiny_models import CONFIGS, LLAMA3_ROPE, SHAPE, make_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.console.engines import show_commands
from surgery.console.page import new_page
from surgery.engines.facts import Facts
from surgery.engines.limits import mla_limits
from surgery.engines.table import diagnose, engine_table, refuse_unless_loadable
from surgery.engines.verdict import LOADS, LOADS_WITH, NOT_TRIED, REFUSED
from surgery.export import export_checkpoint
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.mla.settings import ConvertSettings

MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default"},
    "dtype": "bfloat16",
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def verdict_of(config: dict, engine: str) -> dict:
    return engine_table(config, "ckpt")[engine]


def test_vllm_takes_its_sizes_only():
    whole = verdict_of(MLA, "vLLM on CUDA")
    assert (whole["status"], whole["command"]) == (LOADS, "vllm serve ckpt")
    assert whole["cache_bytes_per_token"] == 2 * 576 * 2
    mixture = verdict_of({**OWN, "attention_layers": [OWN["attention_layers"][0], None]}, "vLLM on CPU")
    assert mixture["status"] == LOADS_WITH and "with our plugin" in mixture["reason"]
    narrow = verdict_of({**MLA, "kv_lora_rank": 400}, "vLLM on CUDA")
    assert narrow["status"] == NOT_TRIED and "--attention-backend TRITON_MLA" in narrow["command"]
    for change in ({"qk_rope_head_dim": 32}, {"qk_nope_head_dim": 64, "v_head_dim": 64}):
        refused = verdict_of({**MLA, **change}, "vLLM on CUDA")
        assert refused["status"] == REFUSED and refused["remedy"] == "convert --to mla --engine vllm"


def test_biases_and_frequency_lists_are_no_yes_in_native_classes():
    for change in ({"attention_bias": True}, {"rope_parameters": {"rope_type": "longrope"}}):
        table = engine_table({**MLA, **change})
        assert table["transformers"]["status"] == LOADS and table["llama.cpp"]["status"] == REFUSED
        assert table["SGLang"]["status"] == REFUSED
        remedy = "convert --to mla --carrier own" if "attention_bias" in change else "convert --to mla --engine vllm"
        assert table["vLLM on CUDA"]["remedy"] == remedy
        others = [table[engine]["remedy"] for engine in ("llama.cpp", "SGLang")]
        without = (
            [None, None]
            if "attention_bias" in change
            else [f"convert --to mla --engine {engine}" for engine in ("llama.cpp", "sglang")]
        )
        assert others == without
        with pytest.raises(SurgeryError, match="--engine vllm"):
            refuse_unless_loadable("vllm", {**MLA, **change})
    refuse_unless_loadable("all", MLA)


def test_what_a_published_llava_leaves_to_its_language_models_class():
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}  # as LLaVA 1.5 has it
    facts = Facts.of({"model_type": "llava", "vision_config": {}, "text_config": text})
    assert facts.pictures and facts.cached_numbers == 2 * 32 * 32 * 128


def test_heads_of_a_family():
    assert Facts.of(LLAMA).cached_numbers == 2 * 2 * 2 * 8
    assert verdict_of(LLAMA, "llama.cpp")["status"] == LOADS_WITH
    assert verdict_of({**LLAMA, "model_type": "qwen3"}, "llama.cpp")["status"] == NOT_TRIED
    assert verdict_of(LLAMA, "vLLM on CUDA")["status"] == NOT_TRIED


OWN = {
    **LLAMA,
    "model_type": "surgery",
    "base_model_type": "llama",
    "dtype": "bfloat16",
    "attention_layers": [
        {"kind": "latent", "kv_lora_rank": rank, "rope_inv_freq": [1.0, 0.1], "key_norm_eps": None} for rank in (12, 20)
    ],
}


def test_the_custom_class_is_served_by_the_plugin():
    on_cpu, on_cuda = verdict_of(OWN, "vLLM on CPU"), verdict_of(OWN, "vLLM on CUDA")
    assert on_cpu["status"] == LOADS_WITH
    assert on_cpu["cache_bytes_per_token"] == 2 * (12 + 4 + 20 + 4)
    assert on_cuda["status"] == NOT_TRIED
    assert on_cuda["command"] == on_cpu["command"] == "python -m surgery_vllm.serve ckpt"
    assert "installed next to vLLM" in on_cuda["reason"] and on_cuda["reason"].endswith("compiled, not run")
    narrow = verdict_of({**MLA, "kv_lora_rank": 400}, "vLLM on CPU")
    assert narrow["status"] == REFUSED and narrow["remedy"] == "convert --to mla --carrier own"


@pytest.mark.parametrize("base", ["llama", "qwen3"])
def test_another_structure_is_a_remedy_of_sources_that_engines_carry_as_mla(base):
    low_rank = {"kind": "low_rank", "blocks": [{"rank": 4, "keys": [0, 1], "values": [0, 1]}]}
    config = {**OWN, "base_model_type": base, "attention_layers": [low_rank, low_rank]}
    for engine, name in (("SGLang", "sglang"), ("llama.cpp", "llama.cpp"), ("mlx-lm", "mlx")):
        verdict = verdict_of(config, engine)
        assert verdict["status"] == REFUSED
        assert verdict["remedy"] == (f"convert --to mla --engine {name}" if base == "llama" else None)


def test_hybrid_heads_have_bytes_per_token_and_per_request():
    hybrid = {"kind": "hybrid", "kv_heads": 2, "full_heads": 1, "sinks": 4, "recent": 8}
    hybrid["head_order"] = [0, 1]
    on_cpu = verdict_of({**OWN, "attention_layers": [hybrid, None]}, "vLLM on CPU")
    keys_and_values = 2 * 8 * 2  # heads of 8, in bfloat16
    assert on_cpu["status"] == LOADS_WITH
    assert on_cpu["cache_bytes_per_token"] == 3 * keys_and_values
    assert on_cpu["cache_bytes_per_request"] == (4 + 8) * keys_and_values


LATENT_ROWS = {"latent_runs": [["5+3", 2], ["2+2+2+2", 2]], "rope_runs": [["4+4", 2]], "first_tokens": 4}
LATENT_ROWS |= {"kind": "quantized_latent", "kv_lora_rank": 12, "rope_inv_freq": [1.0, 0.1], "key_norm_eps": None}
CASCADE_ROWS = {"latent_runs": [["5+3", 2], ["4+4", 2], ["2+2+2+2", 2]], "first_tokens": 4}
CASCADE_ROWS |= {"kind": "quantized_low_rank", "blocks": [{"rank": 16, "keys": [0, 1], "values": [0, 1]}]}


@pytest.mark.parametrize(
    ("layers", "unpacked"),
    [
        ([LATENT_ROWS] * 2, 16),
        ([LATENT_ROWS, {**LATENT_ROWS, "predicts_values": True}], 20),
        ([CASCADE_ROWS, {**CASCADE_ROWS, "shared_layers": 1, "shared_rank": 16}], 0),
    ],
)
def test_rows_in_bits_have_bytes_per_token_in_any_dtype_and_first_tokens_per_request(layers, unpacked):
    on_cpu, on_cuda = (
        verdict_of({**OWN, "attention_layers": layers}, f"vLLM on {device}") for device in ("CPU", "CUDA")
    )
    assert (on_cpu["status"], on_cuda["status"]) == (LOADS_WITH, NOT_TRIED)
    assert on_cpu["cache_bytes_per_token"] == 2 * 6
    # On CUDA kernels unpack MLA, one layer at a time, to memory in the cache.
    assert on_cuda["cache_bytes_per_token"] == 2 * 6 + unpacked * 2
    assert on_cpu["cache_bytes_per_request"] == 2 * 4 * 16 * 2


def test_what_the_plugin_does_not_serve_is_refused_by_name():
    entries = [{"kind": "cross_layer"}, None]
    for change, message in (
        ({"base_model_type": "mixtral"}, "model family mixtral"),
        ({"attention_layers": entries}, "attention of kind 'cross_layer' (layer 0)"),
        ({"sliding_window": 16, "max_position_embeddings": 64}, "sliding windows"),
    ):
        for engine in ("vLLM on CPU", "vLLM on CUDA"):
            refused = verdict_of({**OWN, **change}, engine)
            assert refused["status"] == REFUSED and refused["reason"].endswith(message)
            assert refused["cache_bytes_per_token"] is None


@pytest.mark.parametrize("engine", ["SGLang", "llama.cpp", "mlx-lm"])
def test_mla_is_no_remedy_for_sources_with_windows(engine):
    config = {**OWN, "base_model_type": "mistral", "sliding_window": 16}
    assert verdict_of({**config, "max_position_embeddings": 64}, engine)["remedy"] is None
    assert verdict_of({**config, "max_position_embeddings": 16}, engine)["remedy"].startswith("convert --to mla")


def test_limits():
    assert mla_limits("vllm", 64, 64).head_sizes == (64, 64, 128)
    assert mla_limits("vllm", 96, 96).head_sizes == mla_limits("all", 128, 128).head_sizes == (128, 64, 128)
    with pytest.raises(SurgeryError, match="head size 256"):
        mla_limits("vllm", 256, 256)


def test_zeros_change_nothing(tmp_path, monkeypatch):
    """Heads of 16 as (64, 64, 128), with zeros among the rotary dimensions: llama3 bends the lower frequencies."""
    shape = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 4}
    llama3 = LlamaConfig(**shape, rms_norm_eps=1e-5, head_dim=16, rope_parameters=LLAMA3_ROPE)
    monkeypatch.setitem(CONFIGS, "wide", lambda: llama3)
    source = make_checkpoint(tmp_path / "source", "wide")
    settings = ConvertSettings(engine="vllm", kv_ratio=0.75, calibration="none")
    report = convert_checkpoint(source, tmp_path / "out", settings).report
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert Facts.of(config).head_sizes == (64, 64, 128) and config["kv_lora_rank"] == 96 - 64
    assert config["rope_parameters"]["rope_type"] == "default" and 0 < report.target["rope_dim"] < 16
    # The written checkpoint, loaded by the stock class, against the layers without zeros.
    assert report.verification["logit_difference_to_simulation"] < 1e-4
    assert report.kv["measured_bytes_per_token"] == report.kv["predicted_bytes_per_token"] == 2 * 96 * 4
    assert report.target["engines"]["vLLM on CUDA"]["status"] == NOT_TRIED


def test_an_engine_without_tied_embeddings_gets_them_twice(checkpoints, tmp_path):
    """The source's eps is stock's, and another one, which has the embeddings rescaled but not the head."""
    for number, eps in enumerate((1e-6, 1e-5)):
        source = make_checkpoint(tmp_path / f"source{number}", "llama")
        edit_config(source, rms_norm_eps=eps)
        settings = ConvertSettings(engine="mlx", kv_ratio=0.5, calibration="none")
        result = convert_checkpoint(source, tmp_path / f"out{number}", settings)
        assert result.report.verification["logit_difference_to_simulation"] < 1e-4
        results, before = CheckpointReader.open(result.path), CheckpointReader.open(source)
        assert before.config["tie_word_embeddings"] and not results.config["tie_word_embeddings"]
        embedding = before.tensor("model.embed_tokens.weight")
        assert torch.equal(results.tensor("lm_head.weight"), embedding)
        assert torch.equal(results.tensor("model.embed_tokens.weight"), embedding) == (eps == 1e-6)
        assert verdict_of(results.config, "mlx-lm")["status"] == LOADS_WITH
        tied = verdict_of({**results.config, "tie_word_embeddings": True}, "mlx-lm")
        assert tied["status"] == REFUSED and tied["remedy"] == "convert --to mla --engine mlx"


def test_fewer_heads_say_how_they_rotate_where_mlx_looks(checkpoints, tmp_path):
    source = checkpoints("llama3")
    assert (
        "add them to config.json next to rope_parameters"
        in verdict_of(json.loads((source / "config.json").read_text()), "mlx-lm")["reason"]
    )
    path = convert_checkpoint(source, tmp_path / "out", KVHeadsSettings(kv_heads=1, calibration="none")).path
    config = json.loads((path / "config.json").read_text())
    assert config["rope_theta"] == 500_000.0 and config["rope_scaling"]["rope_type"] == "llama3"
    assert verdict_of(config, "mlx-lm")["status"] == LOADS_WITH
    loaded, before = (AutoConfig.from_pretrained(each).rope_parameters for each in (path, source))
    assert loaded == before


def commands_of(path) -> dict[str, tuple[str, str | None]]:
    return {verdict.engine: (verdict.status, verdict.command) for verdict in diagnose(path).verdicts}


@pytest.mark.parametrize(("name", "kind", "status"), [("llama", "F32", LOADS_WITH), ("qwen2", "Q8_0", NOT_TRIED)])
def test_commands_for_a_gguf_file_name_what_reads_it(name, kind, status, tmp_path):
    folder = tmp_path / "my models"
    folder.mkdir()
    path = write_gguf(folder / "a.gguf", make_model(name), kind)
    python = f'AutoModelForCausalLM.from_pretrained("{folder}", gguf_file="a.gguf", dtype="auto")'
    for source in (path, folder):
        rows = commands_of(source)
        assert rows.pop("llama.cpp") == (status, f"llama-server -m '{path}'")
        assert rows.pop("transformers") == (NOT_TRIED, python)
        assert set(rows.values()) == {(NOT_TRIED, None)}
    AutoModelForCausalLM.from_pretrained(folder, gguf_file="a.gguf", dtype="auto")


def test_commands_quote_paths_for_the_shell_and_name_what_the_tokenizer_needs(checkpoints, tmp_path):
    path = tmp_path / "my model"
    shutil.copytree(checkpoints("llama"), path)
    export = f"surgery export '{path}' --engine llama.cpp"
    serve = f"llama-server -m '{path}.gguf'"
    rows = commands_of(path)
    assert rows["llama.cpp"][1] == f"{export} && {serve}"
    assert rows["vLLM on CUDA"][1] == f"vllm serve '{path}'"
    assert rows["transformers"][1] == f'AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")'
    document = json.loads((path / "tokenizer.json").read_text())
    for damage in ({"byte_fallback": True}, {"type": "Unigram"}, {"type": None}):
        changed = {**document, "model": document["model"] | damage}
        (path / "tokenizer.json").write_text(json.dumps(changed))
        assert commands_of(path)["llama.cpp"][1] == f"{export} --tokenizer-from SOURCE.gguf && {serve}"


def test_printed_commands_quote_paths_for_the_shell(checkpoints, tmp_path, monkeypatch, capsys):
    shutil.copytree(checkpoints("llama"), tmp_path / "my model")
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_main(monkeypatch, capsys, "inspect", "my model")
    assert code == 0 and "surgery plan 'my model' --kv-ratio" in out and "convert 'my model' --to" in out
    show_commands(new_page(), engine_table(LLAMA), tmp_path / "my model")
    lines = capsys.readouterr().out.splitlines()
    assert f'transformers: AutoModelForCausalLM.from_pretrained("{tmp_path}/my model", dtype="auto")' in lines
    assert "vLLM on CUDA: vllm serve 'my model'" in lines
    assert "llama.cpp: surgery export 'my model' --engine llama.cpp && llama-server -m 'my model'.gguf" in lines
    exported = export_checkpoint("my model", "llama.cpp")
    assert exported.command == f"llama-server -m '{tmp_path}/my model.gguf'"
    assert exported.command_q8_0 is None  # heads of 16 are half a block


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "added"),
    [(LINEAR, {}), (YARN, {"beta_fast": 32.0, "beta_slow": 1.0}), (YARN | {"beta_fast": 16.0}, {"beta_slow": 1.0})],
)
def test_linear_and_yarn_scaling_are_exported(rope, added, checkpoints, tmp_path):
    path = tmp_path / "ckpt"
    shutil.copytree(checkpoints("llama"), path)
    edit_config(path, rope_parameters=rope)
    assert commands_of(path)["llama.cpp"][0] == LOADS_WITH
    exported = CheckpointReader.open(export_checkpoint(path, "llama.cpp", weights="f32").path)
    assert exported.config["rope_parameters"] == added | rope
    source, name = CheckpointReader.open(path), "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(exported.tensor(name), source.tensor(name))


def test_scaling_that_an_export_cannot_write_is_refused_before_it(checkpoints, tmp_path):
    path = tmp_path / "ckpt"
    shutil.copytree(checkpoints("llama"), path)
    for rope in ({**YARN, "attention_factor": 1.0}, {**LINEAR, "rope_type": "dynamic"}):
        edit_config(path, rope_parameters=rope)
        assert commands_of(path)["llama.cpp"] == (REFUSED, None)
        with pytest.raises(SurgeryError) as error:
            export_checkpoint(path, "llama.cpp")
        assert error.value.path == path


def test_a_tokenizer_is_copied_from_a_gguf_file_of_the_same_tokens(checkpoints, tmp_path):
    source, out = checkpoints("llama"), tmp_path / "out.gguf"
    model = make_model("llama")
    other = write_gguf(tmp_path / "other.gguf", model, tokenizer=True)
    copied = CheckpointReader.open(export_checkpoint(source, "llama.cpp", out, tokenizer_from=other).path)
    ids = [AutoTokenizer.from_pretrained(path)("def f(x):").input_ids for path in (copied.path, source)]
    assert ids[0] == ids[1]
    content = other.read_bytes()
    tokens = [f"token {number}" for number in range(4096)]
    refused = {
        "no tokens": lambda: write_gguf(other, model),
        "fewer tokens": lambda: write_gguf(other, model, more={"tokenizer.ggml.tokens": tokens[1:]}),
        "other tokens": lambda: write_gguf(other, model, more={"tokenizer.ggml.tokens": tokens}),
        "truncated": lambda: other.write_bytes(content[:2000]),
        "not GGUF": lambda: other.write_bytes(b"x" * 100),
    }
    for name, write in refused.items():
        write()
        with pytest.raises(SurgeryError) as error:
            export_checkpoint(source, "llama.cpp", out, tokenizer_from=other, overwrite=True)
        assert error.value.path == other
        assert error.value.setting == (None if name in ("truncated", "not GGUF") else "tokenizer_from")


@pytest.mark.parametrize(("name", "message"), [("qwen2", "cannot be exported"), ("mistral_window", "sliding windows")])
def test_export_refuses_by_name(name, message, checkpoints, tmp_path):
    with pytest.raises(SurgeryError, match=message):
        export_checkpoint(checkpoints(name), "llama.cpp", tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())
