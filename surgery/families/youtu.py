"""Youtu-LLM: DeepSeek-V3's attention with dense feed-forward layers."""

from surgery.families.latent_family import LatentFamily, mla_scale

YOUTU = LatentFamily(model_type="youtu", scale=mla_scale)
