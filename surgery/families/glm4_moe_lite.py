"""GLM-4.7-Flash: DeepSeek-V3's attention; a list says which layers have experts."""

from surgery.families.latent_family import LatentFamily, mla_scale


def _listed(single, config, layer: int) -> None:
    single.mlp_layer_types = [config.mlp_layer_types[layer]]


GLM4_MOE_LITE = LatentFamily(model_type="glm4_moe_lite", scale=mla_scale, experts=True, expert_layers=_listed)
