"""`surgery heads`: the pattern that it writes, what it refuses, and how it answers."""

import json
import shutil

import pytest
import torch
from command_line import listing, run_main
from config_files import edit_config
from safetensors import safe_open
from tiny_models import DEMO, HELD_OUT

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.heads import scoring
from surgery.heads.pattern import HeadPattern
from surgery.heads.scoring import default_pattern, score_heads, sequence_length
from surgery.heads.settings import HeadSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings

pytestmark = pytest.mark.usefixtures("one_core")

QUICK = {"method": "duo", "steps": 8, "sinks": 4, "recent": 16, "length": 100, "facts": 1, "samples": 1}
QUICK |= {"text": str(HELD_OUT), "device": "cpu"}
FLAGS = [part for name, value in QUICK.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def source(checkpoints):
    return checkpoints("llama")


def quick(**changes):
    return HeadSettings(**{**QUICK, **changes})


def scored(source, out, **changes):
    return score_heads(source, out, quick(**changes)).pattern


def test_the_pattern_says_where_it_came_from(source, tmp_path):
    result = score_heads(source, tmp_path / "new" / "heads.safetensors", quick(length=None))
    assert listing(tmp_path) == ["new", "new/heads.png", "new/heads.safetensors"]
    assert result.heat_map.read_bytes().startswith(b"\x89PNG")
    pattern = HeadPattern.load(result.path)
    assert torch.equal(pattern.scores, result.pattern.scores) and pattern.scores.shape == (2, 2)
    assert pattern.model["sha256"] == CheckpointReader.open(source).fingerprint()
    assert pattern.model["name"] == source.name
    assert (pattern.method, pattern.sinks, pattern.recent, pattern.seeds) == ("duo", 4, 16, (0,))
    assert pattern.settings == {**quick().to_dict(), "length": 128}  # half of the limit
    assert pattern.spread is None and pattern.seconds > 0
    with safe_open(result.path, "pt") as file:
        assert json.loads(file.metadata()["surgery_heads"])["versions"]["torch"] == torch.__version__


def test_another_config_is_another_model(source, tmp_path):
    shutil.copytree(source, tmp_path / "other")
    edit_config(tmp_path / "other", rms_norm_eps=1e-5)
    one, two = (scored(path, tmp_path / f"{path.name}.safetensors", steps=2) for path in (source, tmp_path / "other"))
    assert all(one.model[name] != two.model[name] for name in ("sha256", "config_sha256"))


def test_the_data_hash_is_that_of_what_heads_were_scored_on(source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(HELD_OUT.read_text()[30_000:])

    def data(name, **changes):
        return scored(source, tmp_path / f"{name}.safetensors", steps=2, **changes).data_sha256

    hashes = [data("a"), data("seed", seed=1), data("text", text=str(text)), data("both", seeds=2)]
    assert len(set(hashes)) == 4
    assert data("again") == hashes[0]


def test_texts_that_have_a_name():
    from surgery.evaluation.models import Checkpoint
    from surgery.heads.scoring import Texts

    texts = Texts(Checkpoint.open(str(DEMO)).tokenizer(), quick(text="prose"))
    assert texts.text(0)(2).shape == texts.needles(0)(2).tokens.shape
    assert not torch.equal(texts.text(0)(2), Texts(texts.tokenizer, quick()).text(0)(2))


def test_random_tokens_need_no_text(source, tmp_path):
    assert scored(source, tmp_path / "a.safetensors", method="induction").data_sha256 is None


def test_scores_of_several_seeds_are_their_mean(source, tmp_path):
    both = scored(source, tmp_path / "both.safetensors", seeds=2, seed=3, steps=3)
    alone = [scored(source, tmp_path / f"{seed}.safetensors", seed=seed, steps=3).scores for seed in (3, 4)]
    assert both.seeds == (3, 4)
    assert not torch.equal(*alone)
    torch.testing.assert_close(both.scores, torch.stack(alone).mean(0))
    torch.testing.assert_close(both.spread, torch.stack(alone).std(0))


def test_needles_have_one_bos(tmp_path):
    from surgery.evaluation.models import Checkpoint
    from surgery.heads.scoring import Texts

    texts = Texts(Checkpoint.open(str(DEMO)).tokenizer(), quick())
    tokens = texts.needles(0)(4).tokens
    assert (tokens[:, 0] == 1).all() and not (tokens[:, 1:] == 1).any()
    assert tokens.shape == (4, 100)
    assert torch.equal(texts.text(0)(2)[:, 0], torch.tensor([1, 1]))


def test_what_is_there_is_not_overwritten_unasked(source, tmp_path):
    pattern, picture = tmp_path / "a.safetensors", tmp_path / "a.png"
    for path in (pattern, picture):
        path.write_text("mine")
        with pytest.raises(SurgeryError, match=f"{path.name}: exists; choose another --out or pass --overwrite"):
            scored(source, pattern)
        assert path.read_text() == "mine"
        path.unlink()
    for _ in range(2):
        score_heads(source, pattern, quick(method="induction"), overwrite=True)
    assert HeadPattern.load(pattern).method == "induction"


def test_outputs_that_cannot_be_written_are_refused_before_scoring(source, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "load_model", lambda *_: pytest.fail("loaded"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.safetensors").mkdir()
    for name, message in (
        ("file/a.safetensors", "file: File exists|Not a directory"),
        ("folder.safetensors", "is a folder"),
        ("pattern.png", r"pattern\.png\.safetensors"),
        ("pattern", r"pattern\.safetensors"),
    ):
        with pytest.raises(SurgeryError, match=message):
            score_heads(source, tmp_path / name, quick(), overwrite=True)
    assert listing(tmp_path) == ["file", "folder.safetensors"]


def test_the_demo_model_copies_its_needles(tmp_path):
    pattern = scored(DEMO, tmp_path / "a.safetensors", method="needle", length=256)
    assert pattern.scores.shape == (6, 4) and pattern.facts["needles_answered"]
    assert pattern.scores.max() > 0.2


@pytest.mark.parametrize(
    ("settings", "heads"),
    [(KVHeadsSettings(kv_heads=1, calibration="none"), 1), (LowRankSettings(kv_ratio=0.5, calibration="none"), 2)],
)
def test_converted_models_are_scored(conversions, tmp_path, settings, heads):
    checkpoint = conversions("llama", settings).path
    for method in ("duo", "induction"):
        pattern = scored(checkpoint, tmp_path / f"{method}.safetensors", method=method, steps=2)
        assert pattern.scores.shape == (2, heads)
    assert pattern.model["sha256"] == CheckpointReader.open(checkpoint).fingerprint()


NONE = {"calibration": "none"}
OTHERS = {
    "stock MLA": (ConvertSettings(**NONE), "heads of MLA share one latent"),
    "own MLA": (ConvertSettings(carrier="own", **NONE), "score its source"),
    "hybrid": (HybridSettings(streaming=1.0, sinks=4, recent=16, **NONE), "some heads stream already"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_models_without_kv_heads_of_their_own_are_refused(conversions, tmp_path, what):
    settings, message = OTHERS[what]
    with pytest.raises(SurgeryError, match=message):
        scored(conversions("llama", settings).path, tmp_path / "a.safetensors")
    assert not listing(tmp_path)


def test_sliding_windows_and_unknown_families_are_refused(checkpoints, source, tmp_path):
    with pytest.raises(SurgeryError, match="full attention in every layer"):
        scored(checkpoints("mistral_window"), tmp_path / "a.safetensors")
    shutil.copytree(source, tmp_path / "other")
    edit_config(tmp_path / "other", model_type="gemma4")
    with pytest.raises(SurgeryError, match="model_type 'gemma4' is not supported"):
        scored(tmp_path / "other", tmp_path / "a.safetensors")


def test_lengths():
    settings = HeadSettings()
    assert sequence_length(settings, {"max_position_embeddings": 131_072}) == 4096
    assert sequence_length(settings, {}) == 4096
    assert sequence_length(settings, {"max_position_embeddings": 2048}) == 1024
    assert sequence_length(settings, {"max_position_embeddings": 1024}) == 3 * (64 + 256)
    assert sequence_length(settings, {"max_position_embeddings": 512}) == 512
    assert sequence_length(quick(length=21), {}) == 21
    with pytest.raises(SurgeryError, match="no head would miss a token"):
        sequence_length(quick(length=20), {})


def test_default_names(source, tmp_path):
    assert default_pattern(source, "duo") == source.parent / f"{source.name}-heads-duo.safetensors"
    assert str(default_pattern("org/model", "duo")) == "model-heads-duo.safetensors"


def test_the_verb(source, tmp_path, monkeypatch, capsys):
    arguments = [source, *FLAGS, "--method", "induction"]
    out = tmp_path / "a.safetensors"
    code, output, err = run_main(monkeypatch, capsys, "heads", *arguments, "--out", out)
    assert code == 0 and "\x1b" not in output
    assert "scores of KV heads, method induction" in output and "4 sinks and 16 recent tokens" in output
    assert f"Next: surgery convert --to hybrid {source} --heads {out} --kv-ratio" in output and "a.png" in output
    code, printed, err = run_main(
        monkeypatch, capsys, "heads", *arguments, "--out", tmp_path / "b.safetensors", "--json"
    )
    assert code == 0 and "echo and induction" in err
    report = json.loads(printed)  # pure: everything else went to standard error
    pattern = HeadPattern.load(out)
    assert report["sha256"] == pattern.sha256
    assert report["scores"] == pattern.scores.tolist()
    assert report["ranking"] == [list(head) for head in pattern.ranking()]
    assert report["path"] == str(tmp_path / "b.safetensors")
    # Flags before the checkpoint, and settings from a file.
    (tmp_path / "heads.yaml").write_text("method: induction\nsamples: 3\n")
    flags = ["--json", "--config", tmp_path / "heads.yaml", *FLAGS[2:], source]
    code, printed, _ = run_main(monkeypatch, capsys, "heads", *flags, "--out", tmp_path / "c.safetensors")
    settings = json.loads(printed)["settings"]
    assert (settings["method"], settings["samples"], settings["length"]) == ("induction", 1, 100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "magic"], "'magic' is unknown: choose duo"),
        (["--length", "300"], "--length 300: the model supports at most 256 tokens"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--device", "abacus"], "--device abacus: not available"),
        (["--seeds", "0"], "seeds must be at least 1"),
        ([], "cannot load it"),  # no tokenizer
    ],
)
def test_errors_are_one_line(flags, message, source, tmp_path, monkeypatch, capsys):
    if not flags:
        source = shutil.copytree(source, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    before = listing(tmp_path)
    out = ("--out", tmp_path / "a.safetensors")
    code, printed, err = run_main(monkeypatch, capsys, "heads", source, *FLAGS, *flags, *out)
    assert code == 1 and printed == "" and listing(tmp_path) == before
    (line,) = (line for line in err.splitlines() if "surgery: error: " in line)
    assert message in line and "Traceback" not in err
