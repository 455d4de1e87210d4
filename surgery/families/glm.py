"""GLM-4: the first half of each head is rotated, in neighboring pairs. GLM-4-0414 also has norms after its blocks.

GLM-4.5 and GLM-4.5-Air have half-split pairs and experts; GLM-4.5 has a q/k-norm.
"""

from surgery.families.base import Family, first_dense

GLM = Family(model_type="glm", partial=True, interleaved=True, extra_parts="fused feed-forward projections")
GLM4 = Family(
    model_type="glm4", partial=True, interleaved=True, extra_parts="norms after attention and feed-forward layers"
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    qk_norm=None,
    partial=True,
    experts=True,
    expert_layers=first_dense,
    extra_parts="partial RoPE",
)
