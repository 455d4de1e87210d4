"""Layer-by-layer statistics equal those of one whole model under autograd."""

import pytest
import torch
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from surgery.calibration.kronecker import kronecker_factors
from surgery.calibration.statistics import lag_statistics, raw_key_gradient
from surgery.calibration.sweep import BoundaryStore, backward_sweep, batch_parts, forward_sweep
from surgery.families.anatomy import HeadNorm
from surgery.families.attention import attention_weights
from surgery.families.rope import to_complex
from surgery.running import layer_stream
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.key_basis import identity_basis

TOKENS = torch.randint(4096, (3, 24), generator=torch.Generator().manual_seed(0))


def swept(folder, monkeypatch=None, labels=None, **kwargs):
    opened = Source.open(folder, ConvertSettings())
    if labels is not None:
        queue = list(labels.split(2))  # the sweep goes by batches of two

        def gradient(hidden, generator):
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad():
                normed = opened.stream.final_norm(leaf)
                weight = torch.cat([rows for _, rows in opened.stream.output_slices()])
                loss = torch.nn.functional.cross_entropy(
                    (normed @ weight.T).flatten(0, 1), queue.pop(0).flatten(), reduction="sum"
                )
            loss.backward()
            return leaf.grad

        monkeypatch.setattr(opened.stream, "sampled_loss_gradient", gradient)
    with BoundaryStore() as store:
        final = forward_sweep(opened.stream, TOKENS, store, 2, lambda: None)
        layers = list(backward_sweep(opened, store, final, 2, **kwargs))
    return opened, sorted(layers, key=lambda layer: layer.index)


def autograd_records(folder, labels, *parts):
    """Inputs and outputs of modules of every attention, by (layer, part), with gradients of the outputs."""
    model, records = AutoModelForCausalLM.from_pretrained(folder).eval(), {}
    for index, block in enumerate(model.model.layers):
        for part in parts:

            def keep(module, args, out, key=(index, part)):
                out.retain_grad()
                records[key] = args[0], out

            getattr(block.self_attn, part).register_forward_hook(keep)
    logits = model(TOKENS).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return records


@pytest.mark.parametrize("name", ["llama", "llama_bias", "qwen2", "mistral_window", "mixtral"])
def test_moments_and_gradients_equal_autograd(checkpoints, monkeypatch, name):
    labels = torch.randint(4096, TOKENS.shape, generator=torch.Generator().manual_seed(1))
    _, layers = swept(checkpoints(name), monkeypatch, labels)
    records = autograd_records(checkpoints(name), labels, "k_proj", "v_proj")
    for layer in layers:
        (_, k), (_, v) = (records[layer.index, part] for part in ("k_proj", "v_proj"))
        z = torch.cat([k, v], dim=-1).flatten(0, 1).double()
        g = torch.cat([k.grad, v.grad], dim=-1).flatten(0, 1).double()
        for result, rows in ((layer.statistics[0].moment, z), (layer.statistics[0].gradient, g)):
            want = (rows.T @ rows / len(rows)).detach()
            assert float((result - want).norm() / want.norm()) < 1e-4
        factors = kronecker_factors([[z.detach()]], [[g]])
        for result, want in (
            (layer.statistics[0].weighted_moment, factors.moment),
            (layer.statistics[0].metric, factors.gradient),
            (layer.statistics[0].weighted_mean, factors.token_weights[0] @ z.detach() / len(z)),
        ):
            assert float((result - want).norm() / want.norm()) < 1e-3
        want = factors.token_weights[0].float()
        torch.testing.assert_close(layer.statistics[0].token_weight, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_what_low_rank_forms_need_equals_autograd(checkpoints, monkeypatch, name):
    """Gradients at the key projection itself, which a key norm follows, and means of everything."""
    labels = torch.randint(4096, TOKENS.shape, generator=torch.Generator().manual_seed(1))
    _, layers = swept(checkpoints(name), monkeypatch, labels)
    records = autograd_records(checkpoints(name), labels, "k_proj", "v_proj")
    for layer in layers:
        (x, k), (_, v) = (records[layer.index, part] for part in ("k_proj", "v_proj"))
        g = torch.cat([k.grad, v.grad], dim=-1).flatten(0, 1)
        statistics, norm = layer.statistics[0], layer.anatomy.k_norm
        assert (statistics.raw_gradient is None) == (norm is None)
        mean = torch.cat([k if norm is None else k * norm.weight.repeat(layer.anatomy.kv_heads), v], dim=-1)
        for result, want in (
            (statistics.gradient if norm is None else statistics.raw_gradient, g.T @ g / len(g)),
            (statistics.mean, mean.mean((0, 1))),
            (statistics.input_energy, x.square().mean((0, 1))),
        ):
            want = want.detach().double()
            assert float((result - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_sweep_without_gradients_gives_the_same_moments(checkpoints, name):
    _, with_gradients = swept(checkpoints(name))
    _, without = swept(checkpoints(name), gradients=False)
    for a, b in zip(with_gradients, without, strict=True):
        torch.testing.assert_close(a.statistics[0].moment, b.statistics[0].moment, rtol=1e-4, atol=1e-5)
        assert b.statistics[0].gradient is None and a.statistics[0].tokens == TOKENS.numel()


@pytest.mark.parametrize(
    ("name", "rows"), [("llama", layer_stream.VOCABULARY_SLICE), ("llama", 1500), ("gemma2", 1500)]
)
def test_sampled_gradient_is_that_of_one_label(checkpoints, monkeypatch, name, rows):
    """Each token's gradient is Wᵀ (p - onehot(y)) for some y, and y is drawn from p, in however many slices.

    After a cap c the logits z let 1 - (z/c)² of it through.
    """
    monkeypatch.setattr(layer_stream, "VOCABULARY_SLICE", rows)
    stream = Source.open(checkpoints(name), ConvertSettings()).stream
    hidden = torch.randn(1, 400, 32, generator=torch.Generator().manual_seed(2))
    hidden[:] = hidden[:, :1]  # one distribution, many draws
    rng = stream.sampled_loss_gradient(hidden, torch.Generator().manual_seed(3))[0]
    leaf = hidden[0, :1]
    logits = stream.logits(leaf)[0]
    probability, cap = logits.softmax(-1), getattr(stream.config, "final_logit_softcapping", None)
    slope = 1.0 if cap is None else 1 - (logits / cap).square()
    weight = torch.cat([rows for _, rows in stream.output_slices()])
    # The norm's Jacobian is the same for all draws; compare before it.
    jacobian = torch.autograd.functional.jacobian(stream.final_norm, leaf[0])
    every = ((probability - torch.eye(len(weight))) * slope) @ weight @ jacobian
    distance = torch.cdist(rng, every)
    nearest, label = distance.min(1)
    assert nearest.max() < 1e-3 * every.norm(dim=1).mean()
    drawn = probability[label].log().mean()
    entropy = (probability * probability.log()).sum()
    assert float(drawn - entropy) == pytest.approx(0, abs=0.25)


@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=["each head", "all heads"])
def test_gradients_before_a_key_norm_are_those_of_autograd(shape):
    generator = torch.Generator().manual_seed(0)
    raw, signal = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64)
    norm = HeadNorm(torch.randn(shape, generator=generator, dtype=torch.float64), 1e-3)
    leaf = raw.clone().requires_grad_()
    (norm(leaf) * signal).sum().backward()
    gain = norm.gain(raw)
    result = raw_key_gradient(raw * norm.weight, signal * gain[..., None], gain, norm.weight)
    torch.testing.assert_close(result, leaf.grad)


def test_lag_statistics_equal_a_direct_sum(checkpoints):
    _, layers = swept(checkpoints("qwen3"))
    layer = layers[0]
    anatomy = layer.anatomy.to(torch.float64)
    basis = identity_basis(anatomy.kv_heads, anatomy.head_dim // 2)
    inputs = layer.inputs[:1].double()
    lags = lag_statistics(anatomy, basis, inputs)

    projection = anatomy.project(inputs)
    weights = attention_weights(anatomy, projection)[0]
    key = to_complex(projection.k[0] * projection.key_gain[0][..., None]).abs().square()
    query = to_complex(projection.q[0]).abs().square()
    tokens, pairs = inputs.shape[1], anatomy.head_dim // 2
    turned = torch.zeros(anatomy.kv_heads * pairs, anatomy.heads, dtype=torch.complex128)
    for head in range(anatomy.heads):
        group = head // 2
        for m in range(tokens):
            for n in range(m + 1):
                angle = anatomy.inv_freq * (n - m)
                term = weights[head, m, n] * query[m, head] * key[n, group] * torch.polar(torch.ones_like(angle), angle)
                turned[group * pairs : (group + 1) * pairs, head] += term
    own = (torch.arange(anatomy.heads) // 2)[None] == (torch.arange(len(turned)) // pairs)[:, None]
    torch.testing.assert_close(lags.turned[own], turned[own], rtol=1e-6, atol=1e-9)
    assert (lags.energy >= lags.turned.abs() - 1e-9).all()


@pytest.mark.parametrize(
    ("sequences", "batch", "ends"), [(5, 2, [2, 4, 5]), (1, 4, [1]), (19, 2, [2, 4, 6, 10, 12, 14, 16, 19])]
)
def test_parts_are_at_most_eight_and_cover_the_text_in_order(sequences, batch, ends):
    parts = batch_parts(sequences, batch)
    assert [part[-1].stop for part in parts] == ends
    assert [row for part in parts for rows in part for row in range(sequences)[rows]] == list(range(sequences))


def test_boundaries_are_removed():
    with BoundaryStore() as store:
        store.save(0, torch.zeros(1, 2, 3))
        folder = store._path(0, "").parent
        assert torch.equal(store.load(0), torch.zeros(1, 2, 3))
    assert not folder.exists()
