"""StableLM: partial rotation, a quarter of each head; LayerNorms."""

from surgery.families.base import Family

STABLELM = Family(model_type="stablelm", partial=True, layer_norm=True, forwards_kwargs=False, extra_parts="LayerNorms")
