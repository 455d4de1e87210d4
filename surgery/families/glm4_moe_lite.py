"""GLM-4.7-Flash: DeepSeek-V3's attention; ``mlp_layer_types`` lists the layers with experts."""

from surgery.families.latent_family import LatentFamily, mla_scale

GLM4_MOE_LITE = LatentFamily(model_type="glm4_moe_lite", scale=mla_scale, experts=True)
