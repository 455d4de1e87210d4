"""StableLM: a quarter of each head is rotated, LayerNorms."""

from surgery.families.base import Family

STABLELM = Family(model_type="stablelm", partial=True, layer_norm=True, forwards_kwargs=False, beside="LayerNorms")
