"""DeepSeek-V2 and V3, which includes Kimi K2, and dense models of these classes: dense layers first, then experts."""

from surgery.families.base import first_dense
from surgery.families.latent_family import LatentFamily, mla_scale

DEEPSEEK_V2 = LatentFamily(
    model_type="deepseek_v2", scale=mla_scale, neighbors=lambda config: True, experts=True, expert_layers=first_dense
)
DEEPSEEK_V3 = LatentFamily(model_type="deepseek_v3", scale=mla_scale, experts=True, expert_layers=first_dense)
