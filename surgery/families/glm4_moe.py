"""GLM-4.5 and GLM-4.5-Air: the first half of each head is rotated, in half-split pairs; GLM-4.5 has a q/k-norm."""

from surgery.families.base import Family


def _dense_layers(single, config, layer: int) -> None:
    single.first_k_dense_replace = int(layer < config.first_k_dense_replace)


GLM4_MOE = Family(
    model_type="glm4_moe",
    qk_norm=None,
    partial=True,
    experts=True,
    expert_layers=_dense_layers,
    beside="a part of each head is rotated",
)
