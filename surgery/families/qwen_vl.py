"""The language models of Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3, each rotary pair turned by one of three positions.

Those are of time, height and width. The same pair of all heads turns by the same one, so that what commutes with the
rotation of every pair commutes with it too, and merged heads stay exact.
"""

from dataclasses import replace

from surgery.families.qwen2 import QWEN2
from surgery.families.qwen3 import QWEN3
from surgery.families.qwen3_moe import QWEN3_MOE

QWEN2_5_VL_TEXT = replace(QWEN2, model_type="qwen2_5_vl_text", axes=True)
QWEN3_VL_TEXT = replace(QWEN3, model_type="qwen3_vl_text", axes=True)
QWEN3_VL_MOE_TEXT = replace(QWEN3_MOE, model_type="qwen3_vl_moe_text", axes=True)
