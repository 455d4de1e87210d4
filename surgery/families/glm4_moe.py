"""GLM-4.5 and GLM-4.5-Air: the first half of each head is rotated, in half-split pairs; GLM-4.5 has a q/k-norm."""

from surgery.families.base import Family, first_dense

GLM4_MOE = Family(
    model_type="glm4_moe",
    qk_norm=None,
    partial=True,
    experts=True,
    expert_layers=first_dense,
    extra_parts="partial RoPE",
)
