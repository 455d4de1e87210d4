"""vLLM serves checkpoints of the project's own class: a plugin that it finds by itself once this is installed.

A package of its own beside :mod:`surgery`, of which it imports the entries of layers and their quantizer, no model:
vLLM loads it in each of its processes, most of which run none. vLLM's entry point group ``vllm.general_plugins`` calls
:func:`register`.
"""

# vLLM promises plugins no stable interface: these are the minor versions that tests ran.
TESTED = ("0.32",)


def register() -> None:
    """Makes vLLM know the config and the model class; safe to call more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from surgery_vllm.config import SurgeryConfig

    AutoConfig.register(SurgeryConfig.model_type, SurgeryConfig, exist_ok=True)
    ModelRegistry.register_model("SurgeryForCausalLM", "surgery_vllm.model:SurgeryForCausalLM")
