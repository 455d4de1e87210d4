"""Nested ranks: what trains is what a slice computes, draws follow from the step."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from healing import heal_here, heal_settings, log_of, losses_of, settings_file, stopped_after
from own_models import KINDS, lossless_low_rank, low_rank_entry, tiny_source
from own_models import tokens as random_tokens
from processes import torchrun
from safetensors.torch import load_file
from tiny_models import add_tokenizer
from transformers import AutoModelForCausalLM

from surgery.architectures.sliced import LatentModel, sliced_tensors
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.training.guards import Interrupted
from surgery.training.nested import NestedRanks, kept_rank
from surgery.training.settings import HealSettings

SHARES = (1.0, 0.5, 0.25)
NESTS = ("latent", "low_rank", "blocks", "window", "streaming_latent", "streaming_blocks")


@pytest.fixture(scope="module")
def source():
    with torch.no_grad():
        return tiny_source("llama").double()


def bent(model, by=0.3):
    """A model whose factors are no longer those of its source, nor orthonormal."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if any(part in name for part in ("kv_down", "_up")):
                each.mul_(1 + by * torch.randn(each.shape, generator=generator, dtype=each.dtype))
    return model


def make(kind, source):
    with torch.no_grad():
        return bent(KINDS[kind](source))


def sliced(model, share, folder) -> SurgeryForCausalLM:
    """The checkpoint that slicing makes of a model, loaded."""
    model.save_pretrained(folder)
    reader = CheckpointReader.open(folder)
    whole = LatentModel.of(reader)
    ranks = tuple(tuple(kept_rank(share, rank) for rank in blocks) for blocks in whole.ranks)
    config = SurgeryConfig(**whole.sliced(ranks).config)
    smaller = SurgeryForCausalLM(config).to(model.dtype)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(whole.layers):
        tensors |= sliced_tensors(reader, whole, layer, ranks)
    smaller.load_state_dict(tensors, strict=True)
    return smaller.eval()


@pytest.mark.parametrize("kind", NESTS)
def test_what_is_cut_is_the_slice(source, kind, tmp_path):
    model, ids = make(kind, source), random_tokens()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        nested = NestedRanks(model, SHARES, seed=0)
        for share in SHARES[1:]:
            with nested.cut(share):
                cut = model(ids, use_cache=False).logits
            expected = sliced(model, share, tmp_path / f"{share}")(ids, use_cache=False).logits
            torch.testing.assert_close(cut, expected, rtol=1e-10, atol=1e-10)
            assert (cut - whole).abs().max() > 1e-3, "nothing was cut"
        assert torch.equal(model(ids, use_cache=False).logits, whole)


def gradients(model):
    down = {f"{index} down": layer.self_attn.kv_down.weight.grad for index, layer in enumerate(model.model.layers)}
    ups = {
        f"{index} {kind} {number}": up.grad
        for index, layer in enumerate(model.model.layers)
        for kind in ("key_up", "value_up")
        for number, up in getattr(layer.self_attn, kind).matrices().items()
    }
    return down, ups


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_slice(source, tmp_path, checkpointing):
    model, ids = make("low_rank", source), random_tokens()
    smaller = sliced(model, 0.5, tmp_path / "slice").train()
    smaller(ids, labels=ids, use_cache=False).loss.backward()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with NestedRanks(model.train(), SHARES, seed=0).cut(0.5):
        model(ids, labels=ids, use_cache=False).loss.backward()
    for own, other in zip(gradients(model), gradients(smaller), strict=True):
        for name, each in other.items():
            entries = own[name][: len(each), : each.shape[1]]
            torch.testing.assert_close(entries, each, rtol=1e-9, atol=1e-12)
            assert own[name].count_nonzero() == entries.count_nonzero(), "dropped latents get no gradient"


def draws(model, seed, steps):
    results = []
    nested = NestedRanks(model, SHARES, seed)
    for step in steps:
        with nested.drawn(step):
            masks = [layer.self_attn.kv_down.latent_mask.clone() for layer in model.model.layers]
            assert nested.kept() == pytest.approx(float(torch.cat(masks).mean()))
            results.append(torch.cat(masks).tolist())
    assert nested.kept() == 1.0
    return results


def test_draws_follow_from_seed_and_step_alone(source):
    first = draws(make("blocks", source), 7, range(200))
    assert draws(make("blocks", source), 7, range(50, 200)) == first[50:]
    assert draws(make("blocks", source), 8, range(200)) != first
    # Blocks of 8 latents. In half of the steps they have one share, in the others each draws its own.
    ranks = torch.tensor(first).view(len(first), -1, 8).sum(-1)
    alike = (ranks == ranks[:, :1]).all(1)
    assert 0.35 < alike.float().mean() < 0.65
    assert all(int((ranks[alike, 0] == 8 * share).sum()) > 15 for share in SHARES)
    apart = ranks[~alike]
    for block in apart.unbind(1):
        counts = [int((block == 8 * share).sum()) for share in SHARES]
        assert sum(counts) == len(block)
        assert min(counts) > len(block) / 6


def test_refuses_students_that_do_not_nest(source):
    for kind, message in (("grouped", "layer 0 has no latents"), ("hybrid", "layer 0 has no latents")):
        with pytest.raises(SurgeryError, match=message):
            NestedRanks(make(kind, source), SHARES, 0)
    with pytest.raises(SurgeryError, match=r"LlamaAttention of layer 0 .*--to lowrank"):
        NestedRanks(source, SHARES, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nested_ranks": [0.5, 0.25]}, "that include 1"),
        ({"nested_ranks": [1.0, 0.5, 0.5]}, "distinct shares"),
        ({"nested_ranks": [1.0, 0.0]}, "distinct shares in"),
        ({"nested_ranks": [2.0, 1.0]}, "distinct shares in"),
        ({"nested_ranks": ["half", 1]}, "must be shares such as"),
        ({"nested_ranks": 0.5}, "must be distinct shares"),
    ],
)
def test_settings_that_cannot_be(values, message):
    with pytest.raises(SurgeryError, match=message):
        HealSettings(**values)
    assert HealSettings(nested_ranks=["0.25", 1]).nested_ranks == (1.0, 0.25)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A low-rank student whose factors were bent, and its source."""
    folder = tmp_path_factory.mktemp("models")
    with torch.no_grad():
        source = tiny_source("llama", vocab_size=4096)
        student = bent(lossless_low_rank(source, [low_rank_entry(), low_rank_entry()]), 0.2)
    for name, each in (("source", source), ("student", student)):
        each.save_pretrained(folder / name)
        add_tokenizer(folder / name)
    return folder / "student", folder / "source"


@pytest.fixture
def settings(tmp_path, models):
    nested = {"nested_ranks": list(SHARES), "eval_every": 10}
    return lambda **others: heal_settings(tmp_path, *models, **{**nested, **others})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models) -> dict:
    """Settings of a finished run with which others are compared."""
    nested = {"nested_ranks": list(SHARES), "eval_every": 10, "max_steps": 4}
    values = heal_settings(tmp_path_factory.mktemp("whole"), *models, **nested)
    heal_here(values)
    return values


def tensors(values):
    return load_file(Path(values["out"]) / "model.safetensors")


def test_a_nested_healing_heals_every_slice(settings):
    values = settings(max_steps=16, learning_rate=5e-3, eval_every=8)
    facts = heal_here(values)
    first, last = facts["held_out"]["first"], facts["held_out"]["last"]
    names = {"cross_entropy", "kl", "teacher_cross_entropy"}
    assert set(last) == names | {f"{name}_at_{share}" for name in ("cross_entropy", "kl") for share in (0.5, 0.25)}
    for name in ("kl", "kl_at_0.5", "kl_at_0.25"):
        assert last[name] < 0.9 * first[name], name
    held_out = log_of(values, "held_out")
    assert [line["step"] for line in held_out] == [0, 8, 16]
    means = [sum(value for name, value in line.items() if name.startswith("cross")) / 3 for line in held_out]
    assert facts["held_out"]["best_cross_entropy"] == pytest.approx(min(means))
    assert {line["latents"] for line in log_of(values)} >= {1.0, 0.5, 0.25}


def test_the_slices_loss_is_that_of_the_sliced_checkpoint(settings, models, tmp_path):
    facts = heal_here(settings(max_steps=1, recall=0.0))
    student = AutoModelForCausalLM.from_pretrained(models[0])
    smaller = tmp_path / "smaller"
    sliced(student, 0.5, tmp_path / "whole").save_pretrained(smaller)
    add_tokenizer(smaller)
    plain = settings(name="plain", max_steps=1, nested_ranks=[]) | {"student": str(smaller)}
    result = heal_here(plain)["held_out"]["first"]
    assert facts["held_out"]["first"]["kl_at_0.5"] == pytest.approx(result["kl"], rel=1e-4)
    assert facts["held_out"]["first"]["cross_entropy_at_0.5"] == pytest.approx(result["cross_entropy"], rel=1e-5)


def test_a_resumed_run_draws_what_it_would_have(settings, whole):
    parts = settings(max_steps=4)
    with stopped_after(3), pytest.raises(Interrupted):
        heal_here(parts)
    with pytest.raises(SurgeryError, match=r"was made with nested_ranks \[1.0, 0.5, 0.25\], not"):
        heal_here(parts | {"nested_ranks": []})
    heal_here(parts)
    assert losses_of(parts) == losses_of(whole)
    assert [line["latents"] for line in log_of(parts)] == [line["latents"] for line in log_of(whole)]
    assert all(torch.equal(each, tensors(whole)[name]) for name, each in tensors(parts).items())


def test_accumulation_draws_once_a_step(settings, whole):
    values = settings(max_steps=4, batch_size=4, gradient_accumulation=1)
    heal_here(values)
    torch.testing.assert_close(losses_of(values), losses_of(whole), rtol=1e-4, atol=0)
    assert [line["latents"] for line in log_of(values)] == [line["latents"] for line in log_of(whole)]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_train_as_one(settings, sharded):
    one = settings(name="one")
    two = settings(name="two", gradient_accumulation=1)
    heal_here(one)
    result = in_two_processes(two, sharded)
    assert result.returncode == 0, result.stderr[-3000:]
    torch.testing.assert_close(losses_of(two), losses_of(one), rtol=1e-4, atol=0)
    last = [log_of(run, "held_out")[-1] for run in (one, two)]
    for name, value in last[0].items():
        if name.startswith(("cross", "kl")):
            assert last[1][name] == pytest.approx(value, rel=1e-4), name


def in_two_processes(values, sharded) -> CompletedProcess:
    """A healing by two processes, under FSDP2 as `test_fsdp2` has it or under DDP."""
    run = [Path(__file__).with_name("test_fsdp2.py")] if sharded else ["-m", "surgery.training.heal", "--config"]
    return torchrun(*run, settings_file(values))
