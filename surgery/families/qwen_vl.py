"""Language models of Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with M-RoPE.

Each rotary pair uses one of three positions: time, height or width. A pair uses the same one in all heads, so that
maps that commute with RoPE also commute with M-RoPE, and merged heads stay exact.
"""

from dataclasses import replace

from surgery.families.qwen2 import QWEN2
from surgery.families.qwen3 import QWEN3
from surgery.families.qwen3_moe import QWEN3_MOE

QWEN2_5_VL_TEXT = replace(QWEN2, model_type="qwen2_5_vl_text", axes=True)
QWEN3_VL_TEXT = replace(QWEN3, model_type="qwen3_vl_text", axes=True)
QWEN3_VL_MOE_TEXT = replace(QWEN3_MOE, model_type="qwen3_vl_moe_text", axes=True)
