"""The fit of low-rank layers: its derivatives, what it finds and leaves alone; and the order of latents."""

from dataclasses import replace

import pytest
import torch
from random_layers import random, random_attention
from tiny_models import DEMO, HELD_OUT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy, HeadNorm
from surgery.families.attention import CapturedAttention
from surgery.families.rope import phases
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.algebra import reduced_rank_projection
from surgery.transforms.attention_fit import flat, unflat
from surgery.transforms.effort import Effort
from surgery.transforms.low_rank_fit import _Linearisation, _Weights, fit_low_rank_layer, order_latents
from surgery.transforms.low_rank_layer import Block, LowRankLayer, SimulatedLowRank

pytestmark = pytest.mark.usefixtures("one_core")

H, G, D, HEAD = 4, 2, 24, 6
JOINT = (Block(7, (0, 1), (0, 1)),)
APART = (Block(4, (0,), (0,)), Block(3, (1,), ()), Block(3, (), (1,)))


def source(*, biased: bool = False, normed: bool = False, over_all: bool = False, **own) -> AttentionAnatomy:
    wide = {"q": (H, HEAD), "k": (G, HEAD)} if over_all else {"q": (HEAD,), "k": (HEAD,)}
    return random_attention(
        *(H, G, D, HEAD),
        biased=biased,
        q_norm=HeadNorm(random(*wide["q"], seed=8), 1e-3) if normed else None,
        k_norm=HeadNorm(random(*wide["k"], seed=9), 1e-3) if normed else None,
        **own,
    )


def low_rank(blocks=JOINT, shared: int = 0, **kinds) -> LowRankLayer:
    rank = sum(block.rank for block in blocks)
    layer = LowRankLayer(
        source(**kinds),
        blocks,
        0.5 * random(rank, D, seed=10),
        random(G, HEAD, shared + rank, seed=11),
        random(G, HEAD, shared + rank, seed=12),
    )
    return replace(
        layer, key_up=layer.key_up * layer.key_mask()[:, None], value_up=layer.value_up * layer.value_mask()[:, None]
    )


def disturbed(layer: LowRankLayer, size: float = 0.05) -> LowRankLayer:
    """A layer nearby, of the same masks."""
    key_up, value_up = (
        up * (1 + size * random(*up.shape, seed=20 + i)) for i, up in enumerate((layer.key_up, layer.value_up))
    )
    return replace(layer, down=layer.down + size * random(*layer.down.shape, seed=22), key_up=key_up, value_up=value_up)


def inputs(seed: int = 30, sequences: int = 4, tokens: int = 40) -> Tensor:
    return random(sequences, tokens, D, seed=seed) * torch.linspace(0.3, 1.5, D) + 0.3 * random(D, seed=seed + 1)


def shared_latents(layer: LowRankLayer, x: Tensor) -> Tensor:
    """Of an earlier layer, whose inputs were others."""
    return torch.tanh(x @ random(D, layer.shared, seed=40))


def output(layer: LowRankLayer, x: Tensor) -> Tensor:
    """By the simulation, which is written apart from the fit; the output bias left out."""
    earlier = torch.nn.Module()
    earlier.latents = [shared_latents(layer, x)]
    return SimulatedLowRank(layer, (earlier,))(x)[0]


def energy(out: Tensor, metric: Tensor) -> float:
    return float(torch.einsum("btx,xy,bty->", out, metric, out))


CASES = {
    "joint": {},
    "biased": {"biased": True},
    "normed": {"biased": True, "normed": True},
    "window": {"window": 9},
    "apart": {"blocks": APART},
    "shared": {"blocks": APART, "shared": 3, "biased": True},
}


LINEARISED = {
    **CASES,
    "normed over all heads": {"normed": True, "over_all": True},
    "capped": {"softcap": 1.5},
    "with sinks": {"sinks": random(H, seed=9)},
    "gated": {"gate": random(H, HEAD, D, seed=8)},
}


@pytest.mark.parametrize("case", LINEARISED)
def test_jvp_is_the_derivative_and_vjp_its_transpose(case):
    layer = low_rank(**LINEARISED[case])
    weights, positions, root, x = _Weights.of(layer), torch.arange(2, 28, 3), random(D, D, seed=50), inputs()[:1, :27]
    phase, shared = phases(layer.source.inv_freq, torch.arange(27), torch.float64), shared_latents(layer, x)[0]

    def linearised(vector: Tensor) -> _Linearisation:
        return _Linearisation(layer, unflat(vector, weights), x[0], shared, phase[:27], positions[:9], root)

    def at(vector: Tensor) -> Tensor:
        return linearised(vector).out.value()

    wanted = output(layer, x)[0, positions] @ root
    here, step = flat(weights), 1e-6
    torch.testing.assert_close(at(here), wanted, atol=1e-9, rtol=1e-9)
    change = random(len(here), seed=51)
    product = linearised(here).jvp(change)
    difference = (at(here + step * change) - at(here - step * change)) / (2 * step)
    torch.testing.assert_close(product, difference, atol=1e-5, rtol=1e-5)
    out = random(*product.shape, seed=52)
    assert float((product * out).sum()) == pytest.approx(float(linearised(here).vjp(out) @ change), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_fit_improves_and_reports_the_error_that_it_leaves(case):
    """Targets are a full-rank layer's; the start is far from what its rank allows."""
    layer = low_rank(**CASES[case])
    x, root = inputs(), random(D, D, seed=60)
    metric, shared = root @ root.T, shared_latents(layer, x)
    targets = CapturedAttention(layer.source)(x)[0]
    norm = energy(targets, metric)
    read = shared if layer.shared else None
    fitted, before, after = fit_low_rank_layer(layer, x, targets, metric, Effort(1, 12, 40), shared=read)
    errors = [energy(output(form, x) - targets, metric) / norm for form in (layer, fitted)]
    assert before == pytest.approx(errors[0], rel=0.05)  # the metric's smallest directions are raised a little
    assert after == pytest.approx(errors[1], rel=0.05)
    assert errors[1] < 0.7 * errors[0]
    assert not fitted.key_up[~layer.key_mask()[:, None].expand_as(fitted.key_up)].any()
    assert not fitted.value_up[~layer.value_mask()[:, None].expand_as(fitted.value_up)].any()
    assert fitted.blocks == layer.blocks
    for name in ("k", "v", "q_bias", "k_bias", "v_bias"):
        assert getattr(fitted.source, name) is getattr(layer.source, name)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in ("joint", "apart"))) for c in CASES])
def test_the_fit_finds_a_layer_that_is_there(case):
    """From a start nearby and noisy targets: it comes closer to the layer than the targets themselves are."""
    wanted = low_rank(**CASES[case])
    x, metric = 0.3 * inputs(), torch.eye(D, dtype=torch.float64)
    shared, clean, start = shared_latents(wanted, x), output(wanted, x), disturbed(wanted)
    targets = clean + 1e-2 * clean.std() * random(*clean.shape, seed=70)
    fitted, _, _ = fit_low_rank_layer(start, x, targets, metric, Effort(3, 20, 40), shared=shared, damping=1e-6)
    errors = [
        energy(out - clean, metric) / energy(clean, metric) for out in (output(start, x), targets, output(fitted, x))
    ]
    assert errors[0] > 4e-3 and errors[1] == pytest.approx(1e-4, rel=0.1)
    assert errors[2] < 0.6e-4


def test_the_same_seed_gives_the_same_layer():
    layer, x = low_rank(), inputs()
    targets = CapturedAttention(layer.source)(x)[0]
    metric = torch.eye(D, dtype=torch.float64)
    one, same, other = (
        fit_low_rank_layer(layer, x, targets, metric, Effort(1, queries=20, seed=seed))[0] for seed in (0, 0, 1)
    )
    assert torch.equal(one.down, same.down) and not torch.equal(one.down, other.down)


def test_the_demo_model_is_fitted():
    """A layer at an eighth of its bytes: on other text the fit halves the error of plain PCA."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    source, index = Source.open(DEMO, ConvertSettings()).anatomy(2).to(torch.float32), 2
    captured = model.model.layers[index].self_attn = CapturedAttention(source)
    text = HELD_OUT.read_text(encoding="utf-8")[:40_000]
    tokens = AutoTokenizer.from_pretrained(DEMO)(text, return_tensors="pt").input_ids[0, : 20 * 256].view(20, 256)
    with torch.no_grad():
        model.model(tokens)
    x, targets, other = captured.inputs[:16], captured.outputs[:16].detach(), slice(16, 20)
    keys, values = captured.projection.k.detach().flatten(2), captured.projection.v.detach().flatten(2)
    z = torch.cat([keys, values], dim=-1)[:16].flatten(0, 1).double()
    weight = torch.cat([source.k.flatten(0, 1), source.v.flatten(0, 1)]).double()
    down, up, _ = reduced_rank_projection(z.T @ z / len(z), torch.eye(len(weight), dtype=torch.float64), 32)
    heads = tuple(range(source.kv_heads))
    key_up, value_up = up.float().view(2, source.kv_heads, source.head_dim, 32)
    closed = LowRankLayer(source, (Block(32, heads, heads),), (down @ weight).float(), key_up, value_up)
    fitted, _, _ = fit_low_rank_layer(closed, x, targets, torch.eye(source.hidden), Effort(2, queries=128))

    def error(form: LowRankLayer) -> float:
        with torch.no_grad():
            out = SimulatedLowRank(form)(captured.inputs[other])[0] - captured.outputs[other]
        return float(out.square().sum() / captured.outputs[other].square().sum())

    assert error(fitted) < 0.5 * error(closed)


@pytest.mark.parametrize("case", ["joint", "shared", "normed"])
def test_ordering_changes_nothing_but_the_basis(case):
    layer, x = low_rank(**CASES[case]), inputs(seed=80)
    latents = layer.latents(x).flatten(0, 1)
    ordered, energies = order_latents(layer, latents.T @ latents / len(latents), _metric())
    torch.testing.assert_close(output(ordered, x), output(layer, x), atol=1e-9, rtol=1e-9)
    assert torch.equal(ordered.key_up[..., : layer.shared], layer.key_up[..., : layer.shared])
    for form, mask in ((ordered.key_up, layer.key_mask()), (ordered.value_up, layer.value_mask())):
        assert not form[~mask[:, None].expand_as(form)].any()
    variances = ordered.latents(x).flatten(0, 1).square().mean(0)
    torch.testing.assert_close(variances, energies)
    for part in energies.split([block.rank for block in layer.blocks]):
        assert torch.equal(part, part.sort(descending=True).values) and part[-1] > 0


def test_latents_that_carry_nothing_do_no_harm():
    """One that is never there, one that nobody reads."""
    layer, x = low_rank(), inputs(seed=81)
    layer.down[2] = 0
    layer.key_up[..., 4] = layer.value_up[..., 4] = 0
    latents = layer.latents(x).flatten(0, 1)
    ordered, energies = order_latents(layer, latents.T @ latents / len(latents), _metric())
    torch.testing.assert_close(output(ordered, x), output(layer, x), atol=1e-9, rtol=1e-9)
    assert float(energies[-2:].sum() / energies.sum()) < 1e-6 and ordered.down.isfinite().all()


@pytest.mark.parametrize("case", ["joint", "apart"])
def test_a_prefix_is_the_best_model_of_its_rank(case):
    """Its error is what was promised, and no other latents of as many numbers, in any linear basis, do better."""
    layer, x = low_rank(**CASES[case]), inputs(seed=82)
    latents, metric = layer.latents(x).flatten(0, 1), _metric()
    ordered, energies = order_latents(layer, latents.T @ latents / len(latents), metric)
    rank = layer.blocks[0].rank

    def error(form: LowRankLayer, kept: int) -> float:
        """Of the first block without its last latents; what is lost is what they would have added."""
        up = torch.cat([form.key_up.flatten(0, 1), form.value_up.flatten(0, 1)])[:, kept:rank]
        lost = form.latents(x).flatten(0, 1)[:, kept:rank] @ up.mT
        return float(((lost @ metric) * lost).sum() / len(lost))

    for kept in range(1, rank):
        assert error(ordered, kept) == pytest.approx(float(energies[kept:rank].sum()), rel=1e-8)
        for seed in range(20):
            mixed = torch.eye(layer.rank, dtype=torch.float64)
            mixed[:rank, :rank] += (0.02 if seed % 2 else 1.0) * random(rank, rank, seed=90 + seed)
            inverse = torch.linalg.inv(mixed)
            other = replace(
                ordered,
                down=mixed @ ordered.down,
                key_up=ordered.key_up @ inverse,
                value_up=ordered.value_up @ inverse,
            )
            assert error(other, kept) > error(ordered, kept)


def test_a_closed_form_is_in_order_already():
    layer, x = source(), inputs(seed=83)
    weight = torch.cat([layer.k.flatten(0, 1), layer.v.flatten(0, 1)])
    z = (x @ weight.mT).flatten(0, 1)
    down, up, energy = reduced_rank_projection(z.T @ z / len(z), _metric(), 7)
    up = up.view(2, G, HEAD, 7)
    form = LowRankLayer(layer, JOINT, down @ weight, up[0], up[1])
    latents = form.latents(x).flatten(0, 1)
    ordered, energies = order_latents(form, latents.T @ latents / len(latents), _metric())
    torch.testing.assert_close(energies, energy[:7], rtol=1e-6, atol=0)
    torch.testing.assert_close(ordered.down.abs(), form.down.abs(), rtol=1e-4, atol=1e-6)


def test_refusals():
    layer, x = low_rank(blocks=APART, shared=3), inputs()
    eye = torch.eye(D, dtype=torch.float64)
    for shared in (None, torch.zeros(4, 40, 2)):
        with pytest.raises(SurgeryError, match="reads 3 shared latents"):
            fit_low_rank_layer(layer, x, x, eye, shared=shared)
    with pytest.raises(SurgeryError, match="the moment is"):
        order_latents(layer, torch.eye(13), _metric())
    with pytest.raises(SurgeryError, match="the metric is"):
        order_latents(layer, torch.eye(10), torch.eye(10))


def _metric() -> Tensor:
    root = random(2 * G * HEAD, 2 * G * HEAD, seed=84)
    return root @ root.T
