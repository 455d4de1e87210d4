"""Caches of engines: their arithmetic against small computations of another kind, their bytes, and what is decoded."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.eval.variants import kvarn_cache, llama_cpp_cache, nvfp4_cache, turboquant_cache, vllm_cache
from surgery.eval.variants.cache_hook import NoVariant
from surgery.eval.variants.coded_cache import CodedLayer, Exact, hadamard, packed, rotated, unpacked
from surgery.eval.variants.engine_cache import FORMATS, engine_cache
from surgery.eval.variants.oscar_cache import RotatedInt2, oscar_rotations
from surgery.model.cache_layer import adopt
from surgery.running.attention_tap import tap_attention

D = 64
NAMES = [*FORMATS, "oscar_int2"]
# Bytes of keys and values of a token and head of 64, without full-precision tokens and layers.
TOKEN_BYTES = {
    **{"fp8": 128, "fp8_per_token_head": 136, "int8_per_token_head": 136, "int4_per_token_head": 72, "nvfp4": 72},
    **{"q8_0": 136, "q5_0": 88, "q4_0": 72},
    **{"turboquant_k8v4": 100, "turboquant_4bit_nc": 70, "turboquant_k3v4_nc": 62, "turboquant_3bit_nc": 54},
    # Scales of a tile of g tokens: 2 · 64 + g of the keys and 64 + 2 g of the values, 2 bytes each.
    **{"kvarn_k4v4_g128": 64 + 6 + 384 / 128, "kvarn_k4v2_g128": 48 + 6 + 384 / 128},
    **{"kvarn_k4v2_g64": 48 + 6 + 384 / 64, "oscar_int2": 40},
}


pytestmark = pytest.mark.usefixtures("no_gradients")


def model_of(layers=2, **more):
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 4}
    config = LlamaConfig(**{**shape, "num_key_value_heads": 2, "head_dim": D, "num_hidden_layers": layers, **more})
    return AutoModelForCausalLM.from_config(config).eval()


def tokens_of(length, batch=1):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def model_for(name):
    """Return a model with one layer between the ends that TurboQuant leaves alone."""
    return model_of(5 if name.startswith("turboquant") else 2)


def variant(name, model):
    return engine_cache(model, name, tokens_of(64, 2) if name == "oscar_int2" else None)


def heads(tokens=8, width=D, seed=0):
    """Keys [1, 2, T, d] with a large channel."""
    values = torch.randn(1, 2, tokens, width, generator=torch.Generator().manual_seed(seed))
    values[..., 3] *= 8
    return values


def through(coder, tokens):
    return coder.decode(coder.encode(tokens))


def decoded(model, tokens, first):
    output = model(tokens[:, :first])
    parts = [output.logits]
    for position in range(first, tokens.shape[1]):
        output = model(tokens[:, position : position + 1], past_key_values=output.past_key_values)
        parts.append(output.logits)
    return torch.cat(parts, dim=1), output.past_key_values


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packing(bits):
    codes = torch.randint(0, 2**bits, (2, 3, 64), dtype=torch.uint8)
    stored = packed(codes, bits)
    assert stored.shape == (2, 3, 8 * bits) and torch.equal(unpacked(stored, bits).byte(), codes)
    with pytest.raises(ValueError):
        packed(codes[..., :12], 3)


def test_rotation_is_orthogonal_and_its_own_inverse():
    matrix = hadamard(8)
    torch.testing.assert_close(matrix @ matrix, torch.eye(8))
    assert set(matrix.flatten().tolist()) == {matrix[0, 0].item(), -matrix[0, 0].item()}
    values = heads()
    torch.testing.assert_close(rotated(rotated(values, 16), 16), values)
    with pytest.raises(ValueError):
        hadamard(24)


def test_fp8_and_scales_of_a_token_and_head():
    values = heads()
    assert torch.equal(through(vllm_cache.Fp8(), values), values.to(torch.float8_e4m3fn).float())
    assert through(vllm_cache.Fp8(), torch.full((1, 1, 1, 4), 1e4)).max() == 448
    scale = values.abs().amax(-1, keepdim=True)
    read = through(vllm_cache.PerTokenHead("int8"), values)
    assert torch.equal(read.abs().argmax(-1), values.abs().argmax(-1))
    assert ((read - values).abs() <= scale / 254 * 1.001).all()
    read = through(vllm_cache.PerTokenHead("fp8"), values)
    torch.testing.assert_close(read, (values / scale * 448).to(torch.float8_e4m3fn).float() * scale / 448)


def test_int4_per_token_head_is_even_steps_after_signs_and_hadamard():
    values = heads()
    signs = vllm_cache._signs(D)
    turned = (values * signs) @ hadamard(D) * D**0.5
    least, greatest = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    step = (greatest - least) / 15
    zero = (-least / step).round()
    expected = ((turned / step + zero).round().clamp(0, 15) - zero) * step
    torch.testing.assert_close(
        through(vllm_cache.Int4PerTokenHead(), values), expected / D**0.5 @ hadamard(D) * signs, rtol=1e-4, atol=1e-4
    )
    # Heads that are no power of two are rotated in blocks of the largest that divides them.
    assert vllm_cache.Int4PerTokenHead().encode(heads(width=48))[0].shape[-1] == 24


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q4_0"])
def test_llama_cpp_block_by_block(name):
    coder = llama_cpp_cache.GgmlBlocks(name, values=True)
    values = heads(tokens=3)
    turned = rotated(values, 64)
    read = rotated(coder.decode(coder.encode(values)), 64)
    half = {"q8_0": 127, "q5_0": -16, "q4_0": -8}[name]
    for block, own in zip(turned.reshape(-1, 32), read.reshape(-1, 32), strict=True):
        largest = max(block.tolist(), key=abs)
        scale = abs(largest) / half if half > 0 else largest / half
        codes = [x / scale for x in block.tolist()]
        if half > 0:
            codes = [round(code) for code in codes]
        else:
            codes = [min(-2 * half - 1, math.floor(code - half + 0.5)) + half for code in codes]
        expected = torch.tensor(codes) * torch.tensor(scale).half().float()
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3 * abs(scale))


def test_llama_cpp_rotates_keys_by_the_largest_block_and_values_by_64():
    keys, values = (llama_cpp_cache.GgmlBlocks("q4_0", values=each) for each in (False, True))
    assert [keys.rotation(width) for width in (32, 64, 96, 128, 192, 256)] == [1, 64, 1, 128, 64, 256]
    assert [values.rotation(width) for width in (32, 64, 96, 128, 256)] == [1, 64, 1, 64, 64]
    assert through(keys, torch.zeros(1, 1, 1, 32)).abs().max() == 0
    with pytest.raises(ValueError):
        keys.encode(heads(width=24))
    # Pairs of RoPE side by side: channel 0 is followed by 32, of which a block of 32 then has 16 each.
    own, pairs = heads(width=96), torch.arange(96).view(2, 48).T.flatten()
    turned = llama_cpp_cache.GgmlBlocks("q4_0", values=False, interleaved=True)
    assert torch.equal(through(turned, own)[..., pairs], through(keys, own[..., pairs]))


def test_nvfp4_takes_the_nearest_level_of_a_block():
    values = heads()
    read = through(nvfp4_cache.Nvfp4(), values)
    blocks = values.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    levels = torch.tensor([*nvfp4_cache.LEVELS, *(-level for level in nvfp4_cache.LEVELS)])
    distance = (blocks.unsqueeze(-1) - scale.unsqueeze(-1) * levels).abs()
    error = (read.unflatten(-1, (-1, 16)) - blocks).abs()
    torch.testing.assert_close(error, distance.amin(-1), rtol=1e-5, atol=1e-6)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5, 0, 0, 0, 0, 0]).view(1, 1, 1, 16)
    assert through(nvfp4_cache.Nvfp4(), ties).flatten().tolist()[:11] == [0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -4]


def test_turboquant_keys_have_their_norm_and_the_nearest_centroids():
    # Max (1960), "Quantizing for minimum distortion", table I: the levels of N(0, 1).
    reference = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733])
    torch.testing.assert_close(turboquant_cache.lloyd_max(1, 4)[8:], reference, rtol=0, atol=3e-3)
    reference = torch.tensor([0.2451, 0.7560, 1.344, 2.152])
    torch.testing.assert_close(turboquant_cache.lloyd_max(1, 3)[4:], reference, rtol=0, atol=2e-3)
    keys, levels = heads(), turboquant_cache.lloyd_max(D, 3)
    read = through(turboquant_cache.LloydMaxKeys(3), keys)
    torch.testing.assert_close(read.norm(dim=-1), keys.norm(dim=-1), rtol=1e-3, atol=0)
    directions = rotated(keys / keys.norm(dim=-1, keepdim=True), D)
    nearest = levels[(directions.unsqueeze(-1) - levels).abs().argmin(-1)]
    cosine = torch.nn.functional.cosine_similarity(rotated(read, D), nearest, dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))
    values = heads()
    step = (values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)) / 15
    assert ((through(turboquant_cache.EvenValues(4), values) - values).abs() <= step * 0.51).all()


def test_turboquant_leaves_two_layers_at_each_end():
    layers = turboquant_cache.turboquant_layers("turboquant_k8v4", LlamaConfig(num_hidden_layers=6))
    exact = [isinstance(layer.key_coder, Exact) for layer in layers]
    assert exact == [True, True, False, False, True, True]
    assert isinstance(layers[2].key_coder, vllm_cache.Fp8)


@pytest.mark.parametrize("values", [False, True])
def test_kvarn_rounds_what_is_balanced(values):
    coder = kvarn_cache.KVarNTiles(4, 32, values=values)
    tokens = heads(tokens=64)
    tokens[:, :, 5] *= 20
    tiles = rotated(tokens, D).unflatten(2, (2, 32))
    tiles = tiles if values else tiles.transpose(-1, -2)
    rows, columns = kvarn_cache.balance(tiles)
    balanced = tiles / rows / columns
    # No scale is below exp(-0.3), so that deviations are not all 1.
    assert (kvarn_cache._imbalance(balanced) < kvarn_cache._imbalance(tiles)).all()
    assert rows.min() >= math.exp(-0.3) * 0.999 and columns.min() >= math.exp(-0.3) * 0.999
    step = (balanced.amax(-1, keepdim=True) - balanced.amin(-1, keepdim=True)) / 15
    read = rotated(through(coder, tokens), D).unflatten(2, (2, 32))
    error = (read if values else read.transpose(-1, -2)) - tiles
    assert (error.abs() <= (0.5 * step + 0.01 * balanced.abs().amax()) * rows * columns).all()


def test_oscar_clips_and_rounds_to_four_steps_after_its_rotation():
    keys = heads()
    rotation = torch.linalg.qr(torch.randn(2, D, D, generator=torch.Generator().manual_seed(3))).Q
    read = through(RotatedInt2(rotation, 0.9), keys)
    turned = torch.einsum("bgti,gij->bgtj", keys, rotation)
    limit = turned.abs().sort(-1).values[..., 57:58]
    turned = torch.minimum(torch.maximum(turned, -limit), limit)
    low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    step = (high - low) / 3
    expected = low + ((turned - low) / step).round() * step
    torch.testing.assert_close(torch.einsum("bgti,gij->bgtj", read, rotation), expected, rtol=0.01, atol=0.02)


def test_oscar_rotations_are_eigenvectors_of_what_queries_ask():
    model, tokens = model_of(layers=1), tokens_of(40, 2)
    (keys, values), *rest = oscar_rotations(model, tokens)
    assert not rest and keys.shape == values.shape == (2, D, D)
    torch.testing.assert_close(keys @ keys.transpose(1, 2), torch.eye(D).expand(2, D, D), rtol=0, atol=1e-5)
    attention = model.model.layers[0].self_attn
    states = model.model.layers[0].input_layernorm(model.get_input_embeddings()(tokens))
    # RoPE turns pairs of channels: the trace of the moment is that before it.
    queries = attention.q_proj(states).view(2, 40, 2, 2, D)
    vectors = keys[0] @ hadamard(D)
    moments = {}

    def look(call):
        moments["keys"] = torch.einsum("bhti,bhtj->ij", call.query[:, :2], call.query[:, :2])
        return call.output()

    with tap_attention(model, look):
        model(tokens)
    torch.testing.assert_close(moments["keys"].trace(), queries[:, :, 0].square().sum(), rtol=1e-4, atol=0)
    diagonal = vectors.T @ moments["keys"] @ vectors
    off = diagonal - torch.diag(diagonal.diagonal())
    assert off.abs().max() < 1e-3 * diagonal.diagonal().max()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_format_at_any_context(name):
    model, length = variant(name, model_for(name).bfloat16()), 400
    _, cache = decoded(model, tokens_of(length), length - 3)
    layers, plain = len(model.model.layers), 2 * 2 * D * 2
    whole = 4 if name.startswith("turboquant") else 0  # layers at the ends
    coded = length
    if name.startswith("kvarn"):
        tile = kvarn_cache.PRESETS[name][2]
        coded = (length - 128) // tile * tile
    if name == "oscar_int2":
        coded = length - 320
    expected = (layers - whole) * (2 * TOKEN_BYTES[name] * coded + plain * (length - coded)) + whole * plain * length
    assert cache_bytes(cache) == model.kv_bytes(length) == expected
    assert model.kv_bytes(1) == (layers - whole) * (plain if coded < length else 2 * TOKEN_BYTES[name]) + whole * plain


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_and_decoding_see_the_same(name):
    """Compare up to values at the edge of two codes, and to the token or two by which a window moves in a chunk."""
    model, tokens = model_for(name), tokens_of(386)
    exact = model(tokens, use_cache=False).logits
    model = variant(name, model)
    plain = model(tokens, use_cache=False)
    assert plain.past_key_values is None
    logits, cache = decoded(model, tokens, 300 if name == "kvarn_k4v2_g64" else 385)
    assert cache.get_seq_length() == 386
    assert (logits - plain.logits).norm() < (0.2 if name == "oscar_int2" else 0.05) * (plain.logits - exact).norm()
    changed = (plain.logits - exact).abs().amax(-1)[0] > 1e-5
    first = {"kvarn": 256, "oscar": 384}.get(name.split("_")[0], 0)
    first = 192 if name.endswith("g64") else first
    assert not changed[:first].any() and changed[first:].float().mean() > 0.9


@pytest.mark.parametrize("name", ["int4_per_token_head", "kvarn_k4v2_g64", "oscar_int2"])
def test_layers_with_a_window_keep_full_precision(name):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": D}
    config = Gemma3TextConfig(**shape, num_key_value_heads=2, num_hidden_layers=3, layer_types=kinds, sliding_window=16)
    torch.manual_seed(0)
    model, tokens = Gemma3ForCausalLM(config).eval(), tokens_of(386)
    exact, exact_cache = decoded(model, tokens, 384)
    model = variant(name, model)
    logits, cache = decoded(model, tokens, 384)
    plain = model(tokens, use_cache=False).logits
    assert (logits - plain).norm() < 0.2 * (plain - exact).norm()
    for layer in (0, 2):
        assert type(cache.layers[layer]) is type(exact_cache.layers[layer])
    assert isinstance(cache.layers[1], CodedLayer)
    coded = cache_bytes(cache) - 2 * 2 * 2 * 2 * D * 15 * 4  # keys and values of two layers, of a window less a token
    assert cache_bytes(cache) == model.kv_bytes(386) and 0 < coded < 2 * 2 * D * 386 * 4


def test_first_tokens_and_window_are_exact():
    layer = CodedLayer(vllm_cache.Fp8(), vllm_cache.Fp8(), sinks=3, window=4)
    keys = heads(tokens=20)
    for part in keys.split([9, 1, 10], dim=2):
        read, _ = layer.update(part, part)
    assert torch.equal(read[:, :, :3], keys[:, :, :3]) and torch.equal(read[:, :, -14:], keys[:, :, -14:])
    assert torch.equal(read[:, :, 3:6], keys[:, :, 3:6].to(torch.float8_e4m3fn).float())
    assert layer.keys.shape[2] == 4 and layer.get_seq_length() == 20


def test_a_padded_batch_and_generation():
    model, prompt = variant("kvarn_k4v2_g64", model_of()), tokens_of(300, 2)
    mask = torch.ones_like(prompt)
    mask[1, :10] = 0
    common = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    whole = model.generate(prompt, **common)
    assert torch.equal(model.generate(prompt, **common, prefill_chunk_size=64), whole)
    assert model.generate(prompt, **common, num_beams=2).shape == (2, 304)
    with pytest.raises(SurgeryError):
        model(prompt, attention_mask=torch.zeros(2, 1, 300, 300))
    with pytest.raises(SurgeryError):
        model(prompt, output_hidden_states=True)


def test_what_a_format_cannot_hold_is_refused():
    narrow = model_of(5, head_dim=24)
    for name in ("q4_0", "nvfp4", "turboquant_4bit_nc", "kvarn_k4v2_g128", "oscar_int2"):
        with pytest.raises(NoVariant):
            variant(name, narrow)
    model = variant("fp8", narrow)  # what was refused left no hook
    for again in ("fp8", "q4_0"):
        with pytest.raises(SurgeryError, match="already"):
            variant(again, model)
    for name, match in (("q3_0", "q4_0"), ("oscar_int2", "tokens")):
        with pytest.raises(SurgeryError, match=match):
            engine_cache(model_of(), name)
    with pytest.raises(ValueError):
        adopt(variant("q8_0", model_of())(tokens_of(5)).past_key_values, [CodedLayer(Exact(), Exact())] * 2)
