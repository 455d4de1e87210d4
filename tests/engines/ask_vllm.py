"""Sizes (nope, rope, value) that vLLM's FlashAttention prefill takes; run by the interpreter of its environment.

python ask_vllm.py REQUEST ANSWER
"""

import json
import sys

from vllm.v1.attention.backends import fa_utils

# Missing in the CPU build, and imported by the module that holds the check; the check does not call it.
if not hasattr(fa_utils, "compile_flash_attn_varlen_func_from_specs"):
    fa_utils.compile_flash_attn_varlen_func_from_specs = None

from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

with open(sys.argv[1], encoding="utf-8") as file:
    sizes = json.load(file)["sizes"]
accepted = [
    FlashAttnPrefillBackend.supports_mla_dimensions(
        MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
    )
    for nope, rope, value in sizes
]
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump({"accepted": accepted}, file)
