"""vLLM plugin that serves checkpoints of the custom model class; vLLM discovers it once this package is installed.

A separate package, which imports the layer entries and the quantizer of :mod:`surgery` but no models: vLLM loads
plugins in every process, and most run no model. vLLM calls :func:`register` by its entry point group
``vllm.general_plugins``.
"""

# Tested minor versions; vLLM has no stable plugin interface.
TESTED = ("0.32",)


def register() -> None:
    """Register the config with AutoConfig and the model class with vLLM; safe to call more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from surgery_vllm.config import SurgeryConfig

    AutoConfig.register(SurgeryConfig.model_type, SurgeryConfig, exist_ok=True)
    ModelRegistry.register_model("SurgeryForCausalLM", "surgery_vllm.model:SurgeryForCausalLM")
