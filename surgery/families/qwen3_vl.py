"""The language model of Qwen3-VL: Qwen3's, each rotary pair turned by one of three positions (time, height, width)."""

from surgery.families.base import Family

QWEN3_VL_TEXT = Family(model_type="qwen3_vl_text", qk_norm=True, axes=True)
