"""Every model that is written is right however it is loaded and trained.

Offloading, adapters and sharding hook into calls of modules: a parameter that is read past its module's call stays on
the meta device (huggingface/accelerate#767) or never gets its adapter's gradient (unslothai/unsloth#11132).
"""

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedModel
from written_models import IMAGES, WRITTEN, inputs

from surgery.reporting.adapters import USUAL, adapter_targets, adapters_section
from surgery.training.trainable import add_adapters
from surgery.transforms.algebra import torch_threads

STEPS = 3
QUICK = ("blocks", "latent_key_norm", "hybrid")
"""Models of the default run, where others take part in the slow one only."""

each_model = pytest.mark.parametrize("name", WRITTEN)
each_quick_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WRITTEN]
)


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@cache
def _made(name: str) -> tuple[PreTrainedModel, torch.Tensor]:
    model = WRITTEN[name]()
    return model, logits(model, name)


def model_and_logits(name: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """A model of its own for a test, and its logits."""
    model, expected = _made(name)
    return copy.deepcopy(model), expected


@torch.no_grad()
def logits(model: PreTrainedModel, name: str) -> torch.Tensor:
    """Logits of a prompt and of some steps after it."""
    arguments = inputs(name)
    if name == IMAGES:
        return model(**arguments).logits
    prompt, steps = arguments["input_ids"].split((12 - STEPS, STEPS), dim=1)
    cache = DynamicCache(config=model.config)
    pieces = [model(piece, past_key_values=cache).logits for piece in (prompt, *steps.split(1, dim=1))]
    return torch.cat(pieces, dim=1)


def gradients(model: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Gradients of all parameters that train, of a pass as training makes it; zeros where there is none."""
    model.zero_grad()
    model(**inputs(name), use_cache=False).logits.square().mean().backward()
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    return {key: torch.zeros_like(each) if each.grad is None else each.grad.clone() for key, each in trained.items()}


def without_gradient(model: torch.nn.Module, name: str) -> list[str]:
    """Names of parameters that train, and have no gradient or one that is not finite."""
    return [key for key, grad in gradients(model, name).items() if not (grad.any() and grad.isfinite().all())]


def agree(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert actual.isfinite().all()
    assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


def auto_class(name: str) -> type:
    return AutoModelForImageTextToText if name == IMAGES else AutoModelForCausalLM


def reloaded(folder: Path, name: str, **settings) -> PreTrainedModel:
    model, info = auto_class(name).from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(info.values())
    return model.eval()


# --- loading ---


def saved(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    return reloaded(folder, name)


def sharded(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return reloaded(folder, name)


def device_map(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    """The second layer on the disk: huggingface/accelerate#767."""
    model.save_pretrained(folder)
    (second,) = (key for key, _ in model.named_modules() if key.endswith(".layers.1"))
    loaded = reloaded(folder, name, device_map=_but_one(model, second), offload_folder=folder / "offloaded")
    assert {each.is_meta for key, each in loaded.named_parameters() if key.startswith(second)} == {True}
    return loaded


def _but_one(model: PreTrainedModel, one: str) -> dict[str, str]:
    """A device map with one module on the disk."""
    placed = {one: "disk"}
    while one:
        parent = one.rpartition(".")[0]
        children = (f"{parent}.{child}".lstrip(".") for child, _ in model.get_submodule(parent).named_children())
        placed |= {child: "cpu" for child in children if child != one}
        one = parent
    return placed


def in_cpu_memory(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    """`accelerate.cpu_offload`: huggingface/accelerate#767."""
    cpu_offload(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def on_disk(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    disk_offload(model, folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def partitioned(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    """Weights that are there during calls of their module only, as DeepSpeed's ZeRO-3 has them."""
    whole = {weight: weight.data for weight in model.parameters()}
    for module in model.modules():
        weights = {weight: whole[weight] for weight in module.parameters(recurse=False)}
        module.register_forward_pre_hook(partial(_gather, weights))
        module.register_forward_hook(partial(_release, weights))
    for weight in whole:
        weight.ds_shape = weight.shape
    _release(whole)
    return model


def _gather(weights: dict[torch.nn.Parameter, torch.Tensor], *call) -> None:
    for weight, whole in weights.items():
        weight.data = whole


def _release(weights: dict[torch.nn.Parameter, torch.Tensor], *call) -> None:
    for weight in weights:
        weight.data = weight.new_empty(0)


def copied(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    return copy.deepcopy(model)


def pickled(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


LOADED: dict[str, Callable[[PreTrainedModel, str, Path], PreTrainedModel]] = {
    "saved": saved,
    "sharded": sharded,
    "device_map": device_map,
    "cpu_offload": in_cpu_memory,
    "disk_offload": on_disk,
    "partitioned": partitioned,
    "copied": copied,
    "pickled": pickled,
}


@each_model
def test_parameters_are_read_where_their_module_is_called(name, tmp_path):
    check_loaded("partitioned", name, tmp_path)


@each_quick_model
@pytest.mark.parametrize("aspect", sorted(LOADED.keys() - {"partitioned"}))
def test_a_loaded_model_computes_the_same(aspect, name, tmp_path):
    check_loaded(aspect, name, tmp_path)


def check_loaded(aspect: str, name: str, folder: Path) -> None:
    model, expected = model_and_logits(name)
    agree(logits(LOADED[aspect](model, name, folder), name), expected)


HALF = {torch.float16: 0.01, torch.bfloat16: 0.08}
"""Relative errors that rounding explains."""


@each_quick_model
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_near(dtype, name):
    model, expected = model_and_logits(name)
    actual = logits(model.to(dtype), name).float()
    assert float((actual - expected).norm()) < HALF[dtype] * float(expected.norm())


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_computes_the_same(backend, name):
    model, expected = model_and_logits(name)
    torch._dynamo.reset()
    agree(logits(torch.compile(model, backend=backend), name), expected)


# --- training ---


@each_quick_model
def test_gradient_checkpointing_has_the_same_gradients(name):
    model = model_and_logits(name)[0].train()
    expected = gradients(model, name)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for key, gradient in gradients(model, name).items():
        agree(gradient, expected[key])


@each_model
def test_every_adapter_of_heal_trains(name):
    """`--train lora` on results: unslothai/unsloth#11132."""
    model = model_and_logits(name)[0].train()
    add_adapters(model, rank=2, alpha=4)
    stir_adapters(model)
    assert without_gradient(model, name) == []


def named_modules(model: torch.nn.Module) -> list[str]:
    """Return the projections that recipes for LoRA name, as far as the model has them."""
    last = {key.rpartition(".")[2] for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return sorted(last & set(USUAL))


@each_quick_model
@pytest.mark.parametrize("target", ["all-linear", "named"])
def test_adapters_of_peft_train_and_merge(target, name):
    model, _ = model_and_logits(name)
    check_adapters(model, name, target_modules=target if target == "all-linear" else named_modules(model))


def check_adapters(model: PreTrainedModel, name: str, **targets) -> list[str]:
    """Adapters of PEFT train, and merged they compute the same; gives the names of what trains."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **targets)).train()
    stir_adapters(adapted)
    assert without_gradient(adapted, name) == []
    trained = list(gradients(adapted, name))
    expected = logits(adapted.eval(), name)
    agree(logits(adapted.merge_and_unload(), name), expected, 1e-4)
    return trained


def stir_adapters(model: torch.nn.Module) -> None:
    """Give both factors of all adapters values: a zero B hides the gradient of A."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


# --- names for adapters ---


def targets_of(model: PreTrainedModel) -> dict:
    """Return the adapter targets in a model's card."""
    shapes = {key.replace(".language_model", ""): each.shape for key, each in model.named_parameters()}
    return adapter_targets(shapes)


@each_model
def test_names_for_adapters_are_those_of_the_modules(name):
    """Every matrix of the attentions is listed once, and what is listed as a module is a linear one."""
    model, _ = model_and_logits(name)
    attentions = [layer.self_attn for layer in model.get_decoder().layers]
    matrices = {key for each in attentions for key, value in each.named_parameters() if value.ndim > 1}
    linear = {key for each in attentions for key, module in each.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = targets_of(model)
    assert set(targets["modules"]) == linear and targets["layers"] == len(attentions)
    listed = [*(f"{key}.weight" for key in targets["modules"]), *targets["parameters"], *targets["without"]]
    assert sorted(listed) == sorted(matrices)


@pytest.mark.parametrize("name", ["low_rank", "blocks", "streaming_blocks"])
def test_adapters_of_parameters_train_and_merge(name):
    model, _ = model_and_logits(name)
    targets = targets_of(model)
    modules, parameters = list(targets["modules"]), list(targets["parameters"])
    adapted = check_adapters(model, name, target_modules=modules, target_parameters=parameters)
    assert sum("_up." in key for key in adapted) == 2 * sum(targets["parameters"].values())


def test_usual_names_that_adapt_nothing_are_told():
    """PEFT passes over k_proj and v_proj, which a low-rank attention does not have."""
    from peft import LoraConfig, get_peft_model

    model, _ = model_and_logits("low_rank")
    section = adapters_section(targets_of(model))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=list(USUAL)))
    names = {key.split(".lora_A")[0].rpartition(".")[2] for key, _ in adapted.named_parameters() if ".lora_A" in key}
    assert names == {"q_proj", "o_proj"}
    (missing,) = (line for line in section.splitlines() if "Not in this model" in line)
    assert [each for each in USUAL if f"`{each}`" in missing] == ["k_proj", "v_proj"]
    assert adapters_section(None) == "" and "`kv_down` (1 of 2 layers)" in adapters_section(
        targets_of(model_and_logits("mixed")[0])
    )
