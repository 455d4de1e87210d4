"""DeepSeek-V2 and V3, which includes Kimi K2, and dense models of these classes: dense layers first, then experts.

With DeepSeek-V3's attention: GLM-4.7-Flash, whose ``mlp_layer_types`` lists the layers with experts, and Youtu-LLM.
"""

from surgery.families.base import first_dense
from surgery.families.latent_family import LatentFamily

DEEPSEEK_V2 = LatentFamily(
    model_type="deepseek_v2", neighbors=lambda config: True, experts=True, expert_layers=first_dense
)
DEEPSEEK_V3 = LatentFamily(model_type="deepseek_v3", experts=True, expert_layers=first_dense)
GLM4_MOE_LITE = LatentFamily(model_type="glm4_moe_lite", experts=True)
YOUTU = LatentFamily(model_type="youtu")
