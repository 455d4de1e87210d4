"""OLMo 2 and OLMo 3: RMS norms over all query heads and over all key heads, and no norm before the attention.

OLMo 3 has sliding windows in three of four layers, with their own RoPE.
"""

from surgery.families.base import Family, layer_types_window

POST_NORMS = "norms after attention and feed-forward layers, and none before"

OLMO2 = Family(model_type="olmo2", qk_norm=True, norm_scope="all", extra_parts=POST_NORMS)
OLMO3 = Family(model_type="olmo3", qk_norm=True, norm_scope="all", window=layer_types_window, extra_parts=POST_NORMS)
