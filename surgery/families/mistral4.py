"""Mistral Small 4: DeepSeek-V3's attention, with queries scaled by position as in Ministral 3."""

from surgery.families.base import first_dense
from surgery.families.latent_family import LatentFamily
from surgery.families.mistral import first_scaled

MISTRAL4 = LatentFamily(
    model_type="mistral4", first_scaled=first_scaled, inside="mistral3", experts=True, expert_layers=first_dense
)
