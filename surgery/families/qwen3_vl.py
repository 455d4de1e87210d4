"""The language models of Qwen3-VL: Qwen3's, each rotary pair turned by one of three positions."""

from dataclasses import replace

from surgery.families.base import Family
from surgery.families.qwen3_moe import QWEN3_MOE

QWEN3_VL_TEXT = Family(model_type="qwen3_vl_text", qk_norm=True, axes=True)
QWEN3_VL_MOE_TEXT = replace(QWEN3_MOE, model_type="qwen3_vl_moe_text", axes=True)
