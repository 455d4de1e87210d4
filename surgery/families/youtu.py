"""Youtu-LLM: DeepSeek-V3's attention, dense."""

from surgery.families.latent_family import LatentFamily, mla_scale

YOUTU = LatentFamily(model_type="youtu", scale=mla_scale)
