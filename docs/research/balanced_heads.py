"""Can weights carry a basis that makes an engine's own cache lose less? SmolLM2-135M, training-free, a check by hand.

    PYTHONPATH=. python docs/research/balanced_heads.py TEXT_TO_CALIBRATE balanced
    surgery eval balanced --baseline balanced --data prose --windows 16 --seed 2 --tasks loss --decoded 0 \\
        --variants int4_per_token_head,nvfp4,q4_0

The model computes what it did, exactly: a RoPE pair of a KV head may be scaled by s if its queries are scaled by 1/s,
and a head's values may be multiplied by any invertible M if the output projection is multiplied by its inverse. Both
are chosen to lower the error of a format whose step follows the size of a token and head: with q, k the energies of a
pair, s⁴ = q/k (the bound (Σ √(q k))² / Σ q Σ k of the error is printed); with Σ the moment of values, H that of the
output projection, MᵀM = Σ^-½ (Σ^½ H Σ^½)^½ Σ^-½. Tokens count by the square of the attention that they get.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from surgery.checkpoint.named_models import smollm2
from surgery.evaluation.models import Checkpoint
from surgery.running.models import causal_model

LENGTH, WINDOWS = 1024, 16


def power(moment, exponent):
    values, vectors = torch.linalg.eigh(moment.double())
    return vectors * values.clamp(min=values.max() * 1e-9).pow(exponent) @ vectors.mT


def energies(model, windows):
    """Energies of pairs of queries and keys [G, d/2], and the moment of values [G, d, d], for each layer."""
    config = model.config
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sums = [[0, 0, 0] for _ in model.model.layers]

    def grouped(x):
        return x.unflatten(0, (groups, -1)).sum(1)

    def pairs(x):
        return x.square().unflatten(-1, (2, -1)).sum(-2)

    def hook(layer):
        def add(module, args, kwargs, outputs):
            hidden, attention = kwargs["hidden_states"], outputs[1][0]  # [H, T, T]
            query = module.q_proj(hidden).view(-1, heads, width)
            key, value = (each(hidden).view(-1, groups, width) for each in (module.k_proj, module.v_proj))
            out = module.o_proj.weight.view(-1, heads, width)
            metric = torch.einsum("oha,ohb->hab", out, out)
            each = value.repeat_interleave(heads // groups, 1)
            mean = torch.einsum("hqt,thd->qhd", attention, each)
            mixed = torch.einsum("hab,thb->tha", metric, each)
            gap = (mixed * each).sum(-1).T[:, None] - 2 * torch.einsum("tha,qha->hqt", mixed, mean)
            gap = gap + torch.einsum("qha,hab,qhb->hq", mean, metric, mean)[..., None]
            weight = attention.square() * gap.clamp(min=0)  # what an error of a score moves
            of_layer = sums[layer]
            of_layer[0] += grouped(torch.einsum("hq,qhj->hj", weight.sum(-1), pairs(query)))
            of_layer[1] += torch.einsum("gt,tgj->gj", grouped(weight.sum(1)), pairs(key))
            of_layer[2] += torch.einsum("gt,tga,tgb->gab", grouped(attention.square().sum(1)), value, value)

        return add

    model.set_attn_implementation("eager")
    hooks = [
        layer.self_attn.register_forward_hook(hook(number), with_kwargs=True)
        for number, layer in enumerate(model.model.layers)
    ]
    for window in windows:
        model(window[None])
    for each in hooks:
        each.remove()
    model.set_attn_implementation("sdpa")
    return sums


def balance_keys(attention: nn.Module, query, key):
    scale = (query / key).pow(0.25)
    scale = (scale / scale.log().mean(-1, keepdim=True).exp()).repeat(1, 2)  # [G, d]
    attention.k_proj.weight.mul_(scale.reshape(-1, 1))
    groups, width = scale.shape
    attention.q_proj.weight.view(groups, -1, width, attention.q_proj.in_features).div_(scale[:, None, :, None])


def balance_values(attention: nn.Module, moments):
    groups, width = moments.shape[:2]
    out = attention.o_proj.weight.view(-1, groups, attention.o_proj.in_features // groups // width, width)
    rows = attention.v_proj.weight.view(groups, width, -1)
    for group, moment in enumerate(moments):
        metric = torch.einsum("oha,ohb->ab", out[:, group], out[:, group]).double()
        root, inverse = power(moment, 0.5), power(moment, -0.5)
        square = inverse @ power(root @ metric @ root, 0.5) @ inverse
        rows[group] = (power(square, 0.5) @ rows[group].double()).float()
        out[:, group] = out[:, group] @ power(square, -0.5).float()


@torch.no_grad()
def main(calibration, out):
    checkpoint = Checkpoint.open(str(smollm2()))
    tokenizer, model = checkpoint.tokenizer(), causal_model(checkpoint.reader, dtype=torch.float32).eval()
    ids = tokenizer(Path(calibration).read_text(encoding="utf-8"), verbose=False).input_ids
    windows = torch.tensor(ids[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH)
    sums = energies(model, windows)
    bounds = torch.stack([(q * k).sqrt().sum(-1).square() / (q.sum(-1) * k.sum(-1)) for q, k, _ in sums])
    print(f"keys: error that scales leave, {bounds.mean():.3f} in the mean, {bounds.min():.3f} to {bounds.max():.3f}")
    logits = model(windows[:1]).logits
    for layer, (query, key, moments) in zip(model.model.layers, sums, strict=True):
        balance_keys(layer.self_attn, query, key)
        balance_values(layer.self_attn, moments)
    print(f"logits differ by {(model(windows[:1]).logits - logits).abs().max():.1e} at most")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
