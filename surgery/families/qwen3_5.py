"""Qwen3-Next and the text models of Qwen3.5: attention in one layer of four, with a gate on each head's output.

The remaining layers have linear attention (gated delta rule) and stay unchanged.
"""

from dataclasses import replace

from surgery.families.base import Family
from surgery.families.qwen import QWEN3_MOE

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    qk_norm=True,
    norm_offset=1.0,
    partial=True,
    axes=True,
    output_gate=True,
    extra_parts="a gate on the output of its attention, and recurrent layers",
)
QWEN3_5_MOE_TEXT = replace(QWEN3_5_TEXT, model_type="qwen3_5_moe_text", experts=True)
QWEN3_NEXT = replace(QWEN3_5_MOE_TEXT, model_type="qwen3_next", axes=False, expert_layers=QWEN3_MOE.expert_layers)
