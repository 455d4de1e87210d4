"""What a healing is said to take, beside what real tiny models and a real step of training take."""

import itertools
import json

import pytest
import torch
from command_line import run_main
from own_models import KINDS, tiny_source
from tiny_models import CONFIGS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.training.data import Batch
from surgery.training.distillation import Distillation
from surgery.training.estimate import estimate
from surgery.training.models import set_dtypes
from surgery.training.settings import HealSettings
from surgery.training.trainable import add_adapters, choose

TOKENS, BATCH = 64, 2


def settings(**given) -> HealSettings:
    some = {"dtype": "fp32", "length": TOKENS, "batch_size": BATCH, "gradient_accumulation": 3, "teacher": "t"}
    return HealSettings(**{**some, "max_tokens": 10_000, **given})


def model_of(config, **given):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **given)


def batch(vocabulary=4096):
    tokens = torch.randint(vocabulary, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    return Batch(tokens, tokens.clone(), torch.arange(TOKENS).expand(BATCH, TOKENS) // (TOKENS // 2))


def held_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Allocations(TorchDispatchMode):
    """Bytes of all storages that live, and the most of them at once."""

    def __init__(self, *models):
        super().__init__()
        self._live, self.now, self.peak = {}, 0, 0
        for model in models:
            for parameter in model.parameters():
                self._see(parameter)

    def _see(self, tensor):
        if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._live:
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.now += storage.nbytes()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for address in [address for address, (storage, _) in self._live.items() if storage.expired()]:
            self.now -= self._live.pop(address)[1]
        for leaf in tree_leaves(result):
            self._see(leaf)
        self.peak = max(self.peak, self.now)
        return result


@pytest.mark.parametrize("train", ["attention", "all", "lora"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_of_real_modules(name, train):
    found = estimate(CONFIGS[name](), CONFIGS["llama"](), settings(train=train, dtype="bf16"))
    student = model_of(CONFIGS[name]())
    choose(student, train) if train != "lora" else add_adapters(student, 16, 32.0)
    set_dtypes(student, torch.bfloat16)
    trains = [each for each in student.parameters() if each.requires_grad]
    assert found.held["weights that train"] == held_bytes(trains)
    assert found.held["other weights"] == held_bytes(each for each in student.parameters() if not each.requires_grad)
    assert found.held["teacher"] == held_bytes(model_of(CONFIGS["llama"]()).bfloat16().parameters())


def _steps():
    """All combinations, slow but for half of them, in which each three choices meet in every way."""
    for choices in itertools.product((0, 1), repeat=4):
        peak, dtype, checkpointing, train = choices
        # Most is held in the forward pass, or in the backward pass.
        vocabulary, tolerance = [(512, 0.04), (32, 0.1)][peak]
        values = ["attention", "all"][train], bool(checkpointing), ["fp32", "bf16"][dtype], vocabulary, tolerance
        yield pytest.param(*values, marks=[pytest.mark.slow] * (sum(choices) % 2))


@pytest.mark.parametrize(("train", "checkpointing", "dtype", "vocabulary", "tolerance"), _steps())
def test_a_real_step_takes_what_was_said(train, checkpointing, dtype, vocabulary, tolerance):
    """Gradients and moments to the byte; the peak of all that was allocated nearly."""
    config = CONFIGS["llama3"]()
    config.num_hidden_layers, config.vocab_size = 6, vocabulary
    asked = settings(train=train, gradient_checkpointing=checkpointing, dtype=dtype)
    found = estimate(config, config, asked)
    student, teacher = model_of(config), model_of(config)
    choose(student, train)
    if checkpointing:
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = Distillation(student, asked.weights(), teacher, document_masks=True).train()
    computed = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    set_dtypes(student, computed)
    set_dtypes(teacher, computed)
    trains = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trains, foreach=True)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss, _ = module(batch(vocabulary), float(BATCH * TOKENS))
        loss.backward()
        optimizer.step()

    step()
    assert found.held["gradients"] == held_bytes(each.grad for each in trains)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert found.held["Adam's moments"] == held_bytes(moments)
    with Allocations(student, teacher) as seen:
        for tensor in (*moments, *(each.grad for each in trains)):
            seen._see(tensor)
        step()
    assert seen.peak == pytest.approx(found.peak_bytes, rel=tolerance)


@pytest.mark.parametrize("kind", ["source", "low_rank", "grouped", "shared"])
def test_activations_are_what_autograd_saves(kind):
    """Of kinds for which a CPU has a fused kernel too: values as wide as keys."""
    with torch.no_grad():
        source = tiny_source("llama", tie_word_embeddings=False)
        student = source if kind == "source" else KINDS[kind](source)
    found = estimate(student.config, source.config, settings())
    choose(student, "attention")
    student.train()
    kept, mine = {}, {each.untyped_storage().data_ptr() for each in student.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in mine:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        given = batch(64)
        call = {"input_ids": given.tokens, "position_ids": given.position_ids, "use_cache": False}
        states = student.base_model(**call).last_hidden_state
    assert found.phases["forward"]["activations"] == sum(storage.nbytes() for storage in kept.values())
    assert states.requires_grad


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_flops_are_those_of_a_real_step(name):
    config = CONFIGS[name]()
    found = estimate(config, config, settings(train="all"))
    # Only then does the counter see the attention's products.
    student, teacher = (model_of(config, attn_implementation="eager") for _ in range(2))
    choose(student, "all")
    module = Distillation(student, settings().weights(), teacher, document_masks=True)
    with FlopCounterMode(display=False) as counter:
        loss, _ = module(batch(), float(BATCH * TOKENS))
        forward = counter.get_total_flops()
        loss.backward()
    parts = found.flops_per_token
    positions, tokens = BATCH * (TOKENS - 1), BATCH * TOKENS
    head = 2 * 4096 * 32  # of positions that predict something: all but the last of each row
    body = {key: value - (head if "forward" in key else 2 * head) for key, value in parts.items() if value}
    expected = tokens * (body["student forward"] + body["teacher forward"]) + 2 * head * positions
    assert forward == expected
    assert counter.get_total_flops() - forward == tokens * body["student backward"] + 2 * head * positions


def test_training_less_takes_less():
    def peak(**given):
        return estimate(CONFIGS["llama"](), CONFIGS["llama"](), settings(length=256, **given)).peak_bytes

    assert peak(train="attention") < peak(train="all")
    assert peak(gradient_checkpointing=True, batch_size=8) < peak(batch_size=8)
    assert peak(dtype="bf16") < peak()
    assert peak(teacher_logits="cache") < peak()


def test_processes_share_what_is_sharded():
    alone, copies, shards = (
        estimate(CONFIGS["llama"](), CONFIGS["llama"](), settings(), processes, sharded=sharded)
        for processes, sharded in ((1, False), (4, False), (4, True))
    )
    for name in ("weights that train", "other weights", "gradients", "Adam's moments"):
        assert shards.held[name] == alone.held[name] // 4 and copies.held[name] == alone.held[name]
    assert shards.held["teacher"] == alone.held["teacher"] and "gradients on their way" in copies.held
    both = estimate(CONFIGS["llama"](), CONFIGS["llama"](), settings(shard_teacher=True), 4, sharded=True)
    assert both.held["teacher"] < shards.held["teacher"]
    assert copies.tokens_per_step == 4 * alone.tokens_per_step
    assert copies.seconds(1e12, 0.5) == pytest.approx(alone.seconds(1e12, 0.5) / 4, rel=0.2)  # whole steps


def test_the_time_is_flops_over_speed():
    found = estimate(CONFIGS["llama"](), None, settings(teacher=None, max_tokens=None, max_steps=5))
    assert found.tokens == 5 * 3 * BATCH * TOKENS and "teacher" not in found.held
    assert found.seconds(1e9, 0.25) == pytest.approx(found.tokens * sum(found.flops_per_token.values()) / 2.5e8)
    for speed in ((0.0, 0.5), (1e9, 0.0), (1e9, 1.5)):
        with pytest.raises(SurgeryError, match="positive peak"):
            found.seconds(*speed)
    endless = estimate(CONFIGS["llama"](), None, settings(teacher=None, max_tokens=None, max_seconds=60))
    assert endless.seconds(1e9, 0.5) is None


def test_no_device_is_guessed():
    with pytest.raises(SurgeryError, match="dtype auto depends on the device"):
        estimate(CONFIGS["llama"](), None, settings(teacher=None, dtype="auto"))


def test_a_dry_run_only_tells(checkpoints, tmp_path, monkeypatch, capsys):
    source, out = checkpoints("llama"), tmp_path / "out"
    (tmp_path / "fsdp2.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\n")
    asked = ["heal", source, "--teacher", source, "--out", out, "--dry-run", "--device", "cpu", "--max-tokens", "99999"]
    code, shown, error = run_main(monkeypatch, capsys, *asked, "--peak-tflops", "0.1")
    assert code == 0, error
    assert "nothing is trained or written" in " ".join(shown.split())
    assert "time: " in shown and "Adam's moments" in shown
    code, shown, error = run_main(monkeypatch, capsys, *asked, "--json", "--launcher", tmp_path / "fsdp2.yaml")
    plan = json.loads(shown)
    assert plan["estimate"]["processes"] == 4 and plan["estimate"]["sharded"] and plan["time"] is None
    assert plan["settings"]["dtype"] == "fp32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp2.yaml"]
    out.mkdir()
    (out / "kept").touch()
    code, _, error = run_main(monkeypatch, capsys, *asked)
    assert code == 1 and "exists" in error
