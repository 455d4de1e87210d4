"""Predicted times: published ratios, the two sides of the roofline, and why some conversions gain nothing."""

import subprocess
import sys
from dataclasses import replace

import pytest

from surgery.kernels.gpus import GPUS
from surgery.kernels.planner import Block, Grouped, Latent, LowRank, choose, compare, predict, quantised

H200 = GPUS["h200"]
MODELS = {"llama2-7b": (32, 32), "llama3-8b": (32, 8), "qwen2.5-7b": (28, 4)}

# Ratios of bytes a token, 4·G·d over 2·(r + ρ): what memory-bound decoding tends to at large B·S.
TABLE = {
    "llama2-7b": {512: 14.2, 256: 25.6, 128: 42.7},
    "llama3-8b": {512: 3.56, 256: 6.4, 128: 10.7},
    "qwen2.5-7b": {512: 1.78, 256: 3.2, 128: 5.3},
}


def gqa(model: str) -> Grouped:
    heads, kv_heads = MODELS[model]
    return Grouped(heads, kv_heads, 128, 128)


def mla(model: str, rank: int, rope: int = 64) -> Latent:
    return Latent(MODELS[model][0], rank, rope, 128, 128)


@pytest.mark.parametrize("model", TABLE)
@pytest.mark.parametrize("rank", (512, 256, 128))
def test_large_batches_gain_as_many_times_as_bytes_get_fewer(model, rank):
    found = compare([gqa(model)] * 3, [mla(model, rank)] * 3, 131_072, 128, H200)
    assert found.speedup == pytest.approx(found.bytes_ratio, rel=0.01)
    # The table gives two or three digits.
    assert found.bytes_ratio == pytest.approx(TABLE[model][rank], rel=0.01)
    assert found.faster and found.reason is None
    assert found.converted.ways == {"absorb": 3} and found.converted.bound == "memory"


def test_time_by_hand():
    gpu = replace(H200, bytes_per_second=1e12, flops_per_second=1e14, processors=1, launch_seconds=1e-6)
    layer = Latent(16, 48, 16, 32, 32)
    work = choose(layer, 1000, 2, gpu)
    assert work.bytes == 2 * 1000 * (48 + 16) * 2  # one program a row fills one processor: no parts
    assert work.flops == 2 * 2 * 1000 * 16 * (2 * 48 + 16) + 2 * 2 * 16 * 48 * 64
    assert work.seconds(gpu) == pytest.approx(1e-6 + work.bytes / 1e12)
    parts = choose(layer, 1024, 2, replace(gpu, processors=4))
    assert parts.bytes - 2 * 1024 * 128 == 8 * 16 * 48 * 2 * 2  # two splits of two rows, written and read
    assert parts.launches == 2


def test_the_side_of_the_roofline_depends_on_query_rows():
    few, many = mla("llama2-7b", 512), replace(mla("llama2-7b", 512), heads=128)
    assert predict([few], 131_072, 64, H200).bound == "memory"
    assert predict([many], 131_072, 64, H200).bound == "compute"


def test_launches_rule_small_steps():
    for tokens, faster in ((1_024, False), (1_048_576, True)):
        found = compare([gqa("llama3-8b")], [mla("llama3-8b", 512)], tokens, 1, H200)
        assert found.faster is faster
        assert found.speedup < found.bytes_ratio
    small = compare([gqa("llama3-8b")], [mla("llama3-8b", 512)], 1_024, 1, H200)
    assert "launches take" in small.reason and "1,024 tokens" in small.reason


@pytest.mark.parametrize(("heads", "speedup"), [(1, 2.0), (2, 2.0), (4, 1.4), (8, 0.7)])
def test_keys_rebuilt_for_many_heads_cost_more_than_bytes_save(heads, speedup):
    source = Grouped(32, 8, 128, 128)
    blocks = tuple(Block(heads * 64, *served) for served in ((heads, 0), (0, heads)) for _ in range(8 // heads))
    found = compare([source], [LowRank(32, 8, 128, blocks)], 131_072, 64, H200)
    assert found.bytes_ratio == pytest.approx(2.0)
    assert found.speedup == pytest.approx(speedup, rel=0.06)
    assert found.faster is (speedup > 1.1)
    if heads == 8:
        assert "keys of 8 KV heads" in found.reason and "512 FLOPs a byte" in found.reason
        assert "--to mla" in found.reason


def test_a_shared_basis_saves_memory_and_no_reading():
    shared = LowRank(32, 8, 128, (Block(int(0.95 * 2048), 8, 8),))
    found = compare([gqa("llama3-8b")], [shared], 131_072, 8, H200)
    assert not found.faster and "reads 3,890 bytes a token and layer, the source 4,096" in found.reason


def test_reconstructing_is_for_prompts_and_absorbing_for_steps():
    layer = mla("llama3-8b", 512)
    assert choose(layer, 32_768, 4, H200).way == "absorb"
    assert choose(layer, 32_768, 4, H200, new_tokens=32_768).way == "reconstruct"
    stock = compare([gqa("llama3-8b")], [layer], 32_768, 32, H200, way="reconstruct")
    assert not stock.faster and stock.reason == "keys and values are reconstructed in memory at every step"


def test_streaming_heads_and_windows_read_what_they_keep():
    half = Grouped(32, 8, 128, 128, streaming_heads=4, streaming_tokens=320)
    assert half.token_bytes(32_000) == pytest.approx(4 * 512 + 4 * 512 * 0.01)
    assert half.token_bytes(100) == 8 * 512
    window = Grouped(32, 8, 128, 128, window=4096)
    assert compare([window], [mla("llama3-8b", 128)], 131_072, 64, H200).faster is False
    assert replace(mla("llama3-8b", 128), window=4096).token_bytes(131_072) == 384 / 32
    streamed = LowRank(32, 8, 128, (Block(64, 4, 4), Block(64, 4, 4, tokens=320)), exact_tokens=10)
    assert streamed.token_bytes(32_000) == pytest.approx(128 * 1.01 + 40 * 1024 / 32_000)


def test_quantised_numbers_carry_their_scales():
    assert quantised(4, 32) == 0.5 + 4 / 32
    assert quantised(8, 128, zeros=False) == 1 + 2 / 128
    narrow = quantised(8, 128, zeros=False)
    layer = replace(mla("llama2-7b", 512), latent_bytes=narrow, rope_bytes=2.0)
    assert layer.token_bytes(4096) == 512 * narrow + 128


def test_layers_add_up():
    one, other = gqa("llama3-8b"), gqa("qwen2.5-7b")
    both = predict([one, other, one], 8192, 4, H200)
    assert both.seconds == pytest.approx(
        2 * choose(one, 8192, 4, H200).seconds(H200) + choose(other, 8192, 4, H200).seconds(H200)
    )
    assert both.ways == {"read": 3} and both.launches == 6


def test_refusals():
    with pytest.raises(ValueError, match="0 rows"):
        predict([gqa("llama3-8b")], 100, 0, H200)
    with pytest.raises(ValueError, match="keeps the layers"):
        compare([gqa("llama3-8b")], [], 100, 1, H200)


def test_torch_stays_out():
    code = "import sys, surgery.kernels.planner; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    code = f"import sys; sys.argv[0] = 'surgery'; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
