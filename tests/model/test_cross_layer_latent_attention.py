"""A basis shared over the latents of MLA layers."""

import pytest
import torch
from own_models import LATENT, VOCAB, lossless_config, lossless_model, tiny_source
from transformers import DynamicCache

from surgery.eval.kv_cache import cache_bytes
from surgery.model import SurgeryConfig, SurgeryForCausalLM


def text() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 23), generator=torch.Generator().manual_seed(1))


def shared(family: str, rank: int, **recent) -> tuple[SurgeryForCausalLM, SurgeryForCausalLM]:
    """An MLA model, and the same with a basis of orthonormal directions that its two layers share."""
    source = tiny_source(family)
    latent = lossless_model(source)
    recent = {"block": 4, "sinks": 0, "window": 0, **recent}
    entries = [
        {**entry, "kind": "cross_layer_latent", "group_size": 2, "place": index, "rank": rank, **recent}
        for index, entry in enumerate(lossless_config(source).attention_layers)
    ]
    model = SurgeryForCausalLM(SurgeryConfig.from_base(source.config, entries, experts_implementation="eager"))
    model.load_state_dict(latent.state_dict(), strict=False)
    width = entries[0]["kv_lora_rank"]
    basis = torch.linalg.qr(torch.randn(2 * width, 2 * width, generator=torch.Generator().manual_seed(2)))[0][:rank]
    for index, layer in enumerate(model.model.layers):
        part = basis[:, index * width : (index + 1) * width]
        layer.self_attn.basis_down.copy_(part)
        layer.self_attn.basis_up.copy_(part.T)
    return latent, model.eval()


def agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((actual - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_a_basis_of_full_rank_is_the_latent_model(family):
    latent, model = shared(family, 2 * LATENT)
    agree(model(text()).logits, latent(text()).logits)


@pytest.mark.parametrize("recent", [{}, {"sinks": 2, "window": 5, "block": 3}])
def test_every_way_to_feed_a_text_gives_the_same(recent):
    latent, model = shared("qwen3", 7, **recent)
    expected = model(text()).logits
    assert float((expected - latent(text()).logits).abs().max()) > 1e-2
    for pieces in ((5, *[1] * 18), (3, 9, 11)):
        cache = DynamicCache(config=model.config)
        results = [model(piece, past_key_values=cache).logits for piece in text().split(pieces, dim=1)]
        agree(torch.cat(results, dim=1), expected)
        assert cache_bytes(cache) == model.kv_cache_bytes(2, 23)
