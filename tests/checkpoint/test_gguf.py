"""GGUF files as checkpoints: the same numbers as transformers' own loader, read lazily, or refused in one line."""

import errno
import os
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf_files import CONFIGS, SENTENCEPIECE, make_model, write_gguf
from gguf_files import SPACE as _
from tiny_models import DEMO
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.checkpoint import CheckpointReader, location, stores
from surgery.checkpoint.gguf_tokenizer import write_tokenizer
from surgery.checkpoint.model_folder import model_folder
from surgery.common.errors import SurgeryError
from surgery.common.temporary import OTHER_TEMPORARY
from surgery.export import export_checkpoint
from surgery.healing.convert_and_heal import plan_both
from surgery.running.models import tokenizer_of
from surgery.running.source import Source
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.request import ConversionRequest

TOKENS = torch.arange(3, 67)[None] * 61 % 4096
KINDS = {"Q8_0": torch.bfloat16, "Q4_1": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

# Elsewhere transformers' loader has none, or drops biases, scalings, windows, or the scale of queries.
OWN_LOADER = ("llama", "qwen2", "qwen3")


def refused(path, words: str) -> None:
    with pytest.raises(SurgeryError) as caught:
        CheckpointReader.open(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def logits(folder, dtype, **options) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
    # What transformers loads from GGUF it takes for quantized, and refuses its own float().
    return torch.nn.Module.float(model).eval()(TOKENS).logits


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "F32") for name in CONFIGS), *(("llama", kind) for kind in KINDS if kind != "F32")]
)
def test_logits_are_those_of_transformers_own_loader(tmp_path, name, kind):
    model = make_model(name)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    reader = CheckpointReader.open(path)
    assert reader.dequantised_from == (kind if kind.startswith("Q") else None)
    assert {reader.info(each).dtype for each in reader.names()} == {KINDS[kind]}
    actual_logits = logits(model_folder(reader), "auto")
    if name in OWN_LOADER:
        assert torch.equal(actual_logits, logits(tmp_path, KINDS[kind], gguf_file=path.name))
    if kind == "F32":
        with torch.no_grad():
            assert torch.equal(actual_logits, model(TOKENS).logits)


@pytest.mark.parametrize("name", ["llama_bias", "llama_linear", "llama_yarn"])
def test_transformers_own_loader_drops_biases_and_scaling(tmp_path, name):
    model = make_model(name)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert not torch.allclose(logits(tmp_path, "auto", gguf_file=path.name), expected, atol=1e-3)


def test_every_way_to_read_gives_the_same(tmp_path, monkeypatch):
    reader = CheckpointReader.open(write_gguf(tmp_path / "tiny.gguf", make_model("llama_bias"), "Q8_0"))
    whole = reader.tensors("")
    monkeypatch.setattr(stores, "CHUNK_BYTES", 4 * 64 * 5)  # five rows: pieces end within heads
    for name, tensor in whole.items():
        assert torch.equal(reader.tensor(name), tensor), name
        assert torch.equal(torch.cat(list(reader.chunks(name))), tensor.flatten()), name
        if tensor.ndim == 2:
            index = torch.tensor([[9, 3], [3, 31]])
            assert torch.equal(reader.rows(name, index), tensor[index]), name
    store, name = reader._store, "model.layers.1.self_attn.q_proj.weight"
    out = torch.empty(700, dtype=torch.uint8)
    store.read(name, [(3, 403), (1001, 1301)], out)
    flat = whole[name].flatten().view(torch.uint8)
    assert torch.equal(out, torch.cat([flat[3:403], flat[1001:1301]]))


def test_no_more_is_dequantized_than_asked_for(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", make_model("llama"), "Q4_1")
    rows = []

    def watch(data, kind):
        rows.append(len(data))
        return dequantize(data, kind)

    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", watch)
    reader = CheckpointReader.open(path)
    assert max(rows) == 1  # whether types are known, asked with one block of each
    rows.clear()
    reader.rows("model.embed_tokens.weight", torch.tensor([5, 6, 4000]))
    assert rows == [2, 1]
    rows.clear()
    monkeypatch.setattr(stores, "CHUNK_BYTES", 4 * 64 * 100)
    reader.tensor("model.embed_tokens.weight")
    assert max(rows) == 100 and sum(rows) == 4096


def test_the_copy_is_one_checkpoint_with_the_same_content(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", make_model("qwen2"), "Q8_0", tokenizer=True)
    reader = CheckpointReader.open(path)
    copy = CheckpointReader.open(model_folder(reader))
    assert copy.fingerprint() == reader.fingerprint()
    assert model_folder(reader) == copy.path == model_folder(CheckpointReader.open(tmp_path))
    assert [each.name for each in reader.sidecars()] == [each.name for each in copy.sidecars()]
    assert reader.source == path and list(tmp_path.iterdir()) == [path]
    reference = reader.identity()
    assert list(reference.stamp) == [str(path)] and CheckpointReader.open(path).recall(reference)
    os.utime(path)
    assert not CheckpointReader.open(path).recall(reference)
    reader.check_unchanged()
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(SurgeryError, match="was changed while it was read"):
        reader.check_unchanged()


def test_the_tokenizer_is_kept(tmp_path):
    reader = CheckpointReader.open(write_gguf(tmp_path / "a.gguf", make_model("llama"), tokenizer=True))
    result, own = AutoTokenizer.from_pretrained(reader.path), AutoTokenizer.from_pretrained(DEMO)
    for text in ("def f(x):\n    return 1234  # naïve", "日本語 🙂\t½ it's", "<|bos|>a<|endoftext|>"):
        assert result(text).input_ids == own(text).input_ids
        assert result.decode(result(text).input_ids) == text
    assert (result.bos_token_id, result.eos_token_id, result.pad_token_id) == (1, 0, 2)
    assert result.decode([1, 70], skip_special_tokens=True) == result.decode([70])
    assert result.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_digits_are_cut_as_the_file_says(tmp_path):
    # Where digits stand alone no merge may join them; GPT-2's way does, once there is such a merge.
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["1", "2", "3", "4", "12", "34", "1234", "123", "a", "B", "aB"],
        "tokenizer.ggml.merges": ["1 2", "3 4", "12 34", "12 3", "a B"],
    }
    whole, digits, threes = [6], [0, 1, 2, 3], [7, 3]
    cut = {"gpt-2": whole, "olmo": whole, "smollm": digits, "refact": digits, "starcoder": digits, "qwen2": digits}
    cut |= {"command-r": digits, "stablelm2": digits, "tekken": digits, "llama-bpe": threes, "dbrx": threes}
    cut |= {"deepseek-r1-qwen": digits, "seed-coder": digits, "falcon3": threes, "gpt-4o": threes}
    for name, expected in cut.items():
        folder = tmp_path / name
        folder.mkdir()
        write_tokenizer(tmp_path / "a.gguf", {**metadata, "tokenizer.ggml.pre": name}, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("1234").input_ids == expected, name
        assert tokenizer("aB").input_ids == ([8, 9] if name in ("tekken", "gpt-4o") else [10]), name
    with pytest.raises(SurgeryError, match=r"'other'.*; use the Hugging Face checkpoint"):
        write_tokenizer(tmp_path / "a.gguf", {**metadata, "tokenizer.ggml.pre": "other"}, tmp_path)


def test_texts_of_llama3_begin_with_bos_unless_the_file_says_no(tmp_path):
    # As llama.cpp's source has it, read and not run: converters wrote no add_bos_token for years.
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": []}
    metadata |= {"tokenizer.ggml.tokens": ["<s>", "a"], "tokenizer.ggml.bos_token_id": 0}
    for more, expected in (
        ({}, [0, 1]),
        ({"tokenizer.ggml.add_bos_token": False}, [1]),
        ({"tokenizer.ggml.pre": "gpt-2"}, [1]),
    ):
        write_tokenizer(tmp_path / "a.gguf", metadata | more, tmp_path)
        assert AutoTokenizer.from_pretrained(tmp_path)("a").input_ids == expected


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_gemma_merges_in_the_order_of_its_tokens(tmp_path, name):
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["bc", "ab", "  ", "\u2581a", "\u2581", "a", "b", "c"]
    metadata = {"general.architecture": name, "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    metadata["tokenizer.ggml.scores"] = [float(index) for index in range(len(tokens))]  # the other way round
    metadata["tokenizer.ggml.token_type"] = [3, 3, 3, 2, *[6] * 256, 1, 1, 4, 1, 1, 1, 1, 1]
    ids = {"padding": 0, "eos": 1, "bos": 2, "unknown": 3}
    metadata |= {f"tokenizer.ggml.{key}_token_id": index for key, index in ids.items()}
    write_tokenizer(tmp_path / "a.gguf", metadata, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text, expected in (
        ("abc", ["a", "bc"]),
        (" a  b", ["\u2581a", "\u2581\u2581", "b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<eos>a", ["<eos>", "a"]),
    ):
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *expected]
        assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize("name", ["llama", "starcoder2", "phi3"])
@pytest.mark.parametrize(
    ("more", "text", "expected"),
    [
        ({}, "abc", ["<s>", f"{_}a", "bc"]),
        ({}, " a", ["<s>", _, f"{_}a"]),
        ({}, "<|x|>a<s> b", ["<s>", "<|x|>", f"{_}a", "<s>", _, _, "b"]),
        ({}, "é", ["<s>", _, "<0xC3>", "<0xA9>"]),
        ({"add_space_prefix": False}, "abc", ["<s>", "a", "bc"]),
        ({"add_space_prefix": False}, "<|x|>a a", ["<s>", "<|x|>", "a", f"{_}a"]),
        ({"add_bos_token": False, "add_eos_token": True}, "a", [f"{_}a", "</s>"]),
    ],
)
def test_sentencepiece_is_split_as_in_llama_cpp(tmp_path, name, more, text, expected):
    values = SENTENCEPIECE | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    tokenizer = tokenizer_of(CheckpointReader.open(write_gguf(tmp_path / "a.gguf", make_model(name), more=values)))
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    if "<" not in text:
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_added_tokens_of_phi3_strip_the_spaces_after_them(tmp_path):
    values = SENTENCEPIECE | {"general.name": "Phi-3-mini", "tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_of(CheckpointReader.open(write_gguf(tmp_path / "a.gguf", make_model("phi3"), more=values)))
    ids = tokenizer("<|x|>  a<s> a").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "<|x|>", "a", "<s>", f"{_}a"]


def test_llama3_scaling_comes_back_from_its_factors(tmp_path):
    model = make_model("llama")
    wavelengths = 2 * np.pi * 10_000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = ((8192 / wavelengths - 1) / 3).clip(0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    reader = CheckpointReader.open(write_gguf(tmp_path / "a.gguf", model, tensors={"rope_freqs.weight": factors}))
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert reader.config["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 10_000.0, **scaling}
    assert "rope_freqs.weight" not in reader
    refused(write_gguf(tmp_path / "b.gguf", model, tensors={"rope_freqs.weight": factors * 2}), "do not match llama3")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"general.architecture": "gptj"}, "architecture 'gptj' is not supported (supported: llama, qwen2, qwen3, "),
        ({"general.architecture": "gptj"}, "use the Hugging Face checkpoint"),
        ({"llama.expert_count": 4}, "mixture-of-experts"),
        ({"llama.attention.sliding_window": 64}, "sliding windows"),
        ({"llama.rope.scaling.type": "su"}, "RoPE scaling 'su'"),
        ({"llama.rope.scaling.type": "yarn"}, "original_context_length must be a positive integer, not None"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, "YaRN with llama.rope.scaling.a"),
        ({"llama.rope.dimension_count": 8}, "partial RoPE"),
        ({"llama.attention.value_length": 8}, "different head sizes"),
        ({"llama.block_count": None}, "llama.block_count must be a positive integer, not None"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer type 'bert'"),
        ({"tokenizer.ggml.model": "gpt2"}, "no tokens"),
    ],
)
def test_what_cannot_be_carried_is_refused(tmp_path, more, words):
    refused(write_gguf(tmp_path / "a.gguf", make_model("llama"), more=more), words)


def test_other_tokenizers_and_tensors_are_refused(tmp_path):
    refused(write_gguf(tmp_path / "a.gguf", make_model("qwen2"), more=SENTENCEPIECE), "'llama' is not supported for")
    other = {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}
    refused(write_gguf(tmp_path / "a.gguf", make_model("llama"), tensors=other), "blk.0.attn_sinks.weight")


def test_damage(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", make_model("llama"), "Q8_0", tokenizer=True)
    content = path.read_bytes()
    for length in (6, 30, 2000, 80_000):
        path.write_bytes(content[:length])
        refused(path, "inside its header")
    path.write_bytes(content[:-200])
    refused(path, "truncated:")
    path.write_bytes(b"GGML" + content[4:])
    refused(path, "not a GGUF file")
    path.write_bytes(content[:4] + b"\x00\x00\x00\x03" + content[8:])
    refused(path, "big-endian")
    path.write_bytes(content[:16] + b"\xff" * 8 + content[24:])
    refused(path, "header")


def test_files_are_found_by_their_folder_and_any_name(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", make_model("llama"))
    assert CheckpointReader.open(tmp_path).source == path
    (tmp_path / "config.json").write_text("{}")  # as in repositories of GGUF files
    assert CheckpointReader.open(tmp_path).source == path
    write_gguf(tmp_path / "b.gguf", make_model("llama"))
    refused(tmp_path, "contains 2 GGUF files (a.gguf, ...); pass one of them")
    for name in ("a.GGUF", "sha256-3f1b"):  # Ollama's
        other = path.rename(tmp_path / name)
        assert CheckpointReader.open(other).source == other
        other.rename(path)


def test_a_link_keeps_its_name(tmp_path):
    # As in the hub's cache, where the linked file is named by its hash.
    write_gguf(tmp_path / "0f3a", make_model("llama"))
    (tmp_path / "tiny.gguf").symlink_to(tmp_path / "0f3a")
    reader = CheckpointReader.open(tmp_path / "tiny.gguf")
    assert reader.name == "tiny.gguf" and reader.path.name == "tiny"
    assert CheckpointReader.open(reader.source).config == reader.config


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny", "no such folder; did you mean tiny.gguf?"),
        ("models/tiny", "no such folder; did you mean models/tiny.gguf?"),
        ("other.gguf", "no such file; check its path, or download it: hf download org/name FILE.gguf"),
        ("org/other.gguf", "no such file; check its path"),
        ("org/model/other.gguf", "download it: hf download org/model other.gguf --local-dir ."),
    ],
)
def test_a_name_without_a_file_says_what_to_do(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("tiny.gguf", "models/tiny.gguf"):
        (tmp_path / path).write_bytes(b"")
    refused(name, words)


def test_a_hub_repository_of_gguf_files_says_to_download_one(tmp_path, monkeypatch):
    monkeypatch.setattr(location, "download", lambda *args, **options: tmp_path)
    hint = "no config.json on the hub; if it has GGUF files, download one: hf download org/model-GGUF"
    refused("org/model-GGUF", hint)


def test_a_file_without_a_tokenizer_is_named(tmp_path):
    reader = CheckpointReader.open(write_gguf(tmp_path / "a.gguf", make_model("llama")))
    with pytest.raises(SurgeryError, match=r"a\.gguf: contains no tokenizer; use --calibration none"):
        tokenizer_of(reader, remedy="use --calibration none")
    with pytest.raises(SurgeryError) as error:
        export_checkpoint(reader.source, "llama.cpp")
    assert (error.value.path, error.value.setting) == (reader.source, "tokenizer_from")


def without(reader: CheckpointReader, name: str) -> CheckpointReader:
    return reader.corrected({each: value for each, value in reader.config.items() if each != name})


@pytest.mark.parametrize(
    "refusal",
    [
        lambda reader: reader.tensor("missing"),
        lambda reader: export_checkpoint(reader.source, "llama.cpp"),
        lambda reader: Source.of(without(reader, "vocab_size"), SimpleNamespace(device="cpu", dtype="float32")),
        lambda reader: plan_both(ConversionRequest(reader.source, None, KVHeadsSettings(calibration="none")), {}),
    ],
)
def test_errors_name_the_file_and_no_temporary_folder(tmp_path, refusal):
    reader = CheckpointReader.open(write_gguf(tmp_path / "a.gguf", make_model("qwen2")))
    with pytest.raises(SurgeryError) as error:
        refusal(reader)
    assert str(error.value).startswith(str(reader.source))


def full(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name"), [("tempfile", "mkdtemp"), ("pathlib", "Path.write_text"), ("tempfile", "gettempdir")]
)
def test_a_full_disk_for_temporary_files_says_so(tmp_path, monkeypatch, module, name):
    path = write_gguf(tmp_path / "a.gguf", make_model("llama"), tokenizer=True)
    monkeypatch.setattr(f"{module}.{name}", full)
    with pytest.raises(SurgeryError) as error:
        CheckpointReader.open(path)
    assert error.value.hint == OTHER_TEMPORARY


def test_a_copy_without_space_says_where_temporary_files_go(tmp_path, monkeypatch):
    reader = CheckpointReader.open(write_gguf(tmp_path / "a.gguf", make_model("llama")))
    monkeypatch.setattr("surgery.checkpoint.staging.free_bytes", lambda path: 0)
    with pytest.raises(SurgeryError) as error:
        model_folder(reader)
    assert error.value.hint == OTHER_TEMPORARY


def test_without_the_package(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", make_model("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, 'pip install "model-surgery[gguf]"')
