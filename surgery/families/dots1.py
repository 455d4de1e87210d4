"""dots.llm1: per-head RMS norms on queries and keys, windows in some layers; dense layers first, then experts."""

from surgery.families.base import Family, first_dense, layer_types_window

DOTS1 = Family(model_type="dots1", qk_norm=True, window=layer_types_window, experts=True, expert_layers=first_dense)
