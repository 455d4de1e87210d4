"""GLM-4: the first half of each head is rotated, in neighboring pairs. GLM-4-0414 also has norms after its blocks."""

from surgery.families.base import Family

GLM = Family(model_type="glm", partial=True, interleaved=True, extra_parts="fused feed-forward projections")
GLM4 = Family(
    model_type="glm4", partial=True, interleaved=True, extra_parts="norms after attention and feed-forward layers"
)
