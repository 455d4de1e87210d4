"""Estimates of a healing, compared with the cost of real tiny models and a real step of training."""

import json

import pytest
import torch
from command_line import run_main
from tiny_models import CONFIGS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from surgery.checkpoint.named_models import demo_model
from surgery.common.errors import SurgeryError
from surgery.training.data import TrainingRow, collate
from surgery.training.distillation import Distillation
from surgery.training.estimate import estimate
from surgery.training.models import set_dtypes
from surgery.training.settings import HealSettings
from surgery.training.trainable import choose_parameters

TOKENS, BATCH = 64, 2


def settings(**kwargs) -> HealSettings:
    some = {"dtype": "fp32", "length": TOKENS, "batch_size": BATCH, "gradient_accumulation": 3, "teacher": "t"}
    return HealSettings(**{**some, "max_tokens": 10_000, **kwargs})


def llama(**kwargs):
    return estimate(CONFIGS["llama"](), CONFIGS["llama"](), settings(**kwargs))


def model_of(config, **settings):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **settings)


def held_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Allocations(TorchDispatchMode):
    """Bytes of all storages that live, and the most of them at once."""

    def __init__(self, tensors):
        super().__init__()
        self._live, self.now, self.peak = {}, 0, 0
        for tensor in tensors:
            self._see(tensor)

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
def test_weights_are_those_of_real_modules(train):
    options = settings(train=train, dtype="bf16")
    memory = estimate(CONFIGS["qwen3"](), CONFIGS["llama"](), options).memory
    student = model_of(CONFIGS["qwen3"]())
    choose_parameters(student, options)
    set_dtypes(student, torch.bfloat16)
    trains = [each for each in student.parameters() if each.requires_grad]
    assert memory["weights that train"] == memory["gradients"] == memory["Adam's moments"] // 2 == held_bytes(trains)
    assert memory["other weights"] == held_bytes(each for each in student.parameters() if not each.requires_grad)
    assert memory["teacher"] == held_bytes(model_of(CONFIGS["llama"]()).bfloat16().parameters())


def peaks(length, batch, **kwargs) -> tuple[int, int]:
    """Peak bytes of a step of the demo model's first layers, its own teacher: as estimated, and as allocated."""
    config = AutoConfig.from_pretrained(demo_model(), num_hidden_layers=3)
    options = settings(length=length, batch_size=batch, **kwargs)
    student, teacher = model_of(config), model_of(config)
    choose_parameters(student, options)
    if options.gradient_checkpointing:
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = Distillation(student, options.weights(), teacher, document_masks=True).train()
    for each in (student, teacher):
        set_dtypes(each, {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype])
    optimizer = torch.optim.AdamW([each for each in student.parameters() if each.requires_grad])
    tokens = torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    rows = collate([TrainingRow(row, row.clone(), torch.arange(length) // (length // 2)) for row in tokens])

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "bf16"):
            loss, _ = module(rows, float(batch * length))
        loss.backward()
        optimizer.step()

    step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [each.grad for each in student.parameters() if each.grad is not None]
    with Allocations([*student.parameters(), *teacher.parameters(), *moments, *gradients]) as records:
        step()
    return estimate(config, config, options).peak_bytes, records.peak


@pytest.mark.parametrize(
    "settings",
    [
        {"train": "attention"},
        pytest.param({"train": "all", "dtype": "bf16"}, marks=pytest.mark.slow),
        {"train": "attention", "dtype": "bf16", "gradient_checkpointing": True},
    ],
)
def test_a_real_step_takes_what_was_said(settings):
    estimated, allocated = peaks(64, 2, **settings)
    assert estimated == pytest.approx(allocated, rel=0.1)


def test_training_less_takes_less():
    def peak(**settings):
        return llama(**{"length": 256, **settings}).peak_bytes

    assert peak(train="attention") < peak(train="all")
    assert peak(gradient_checkpointing=True, batch_size=8) < peak(batch_size=8)
    assert peak(dtype="bf16") < peak()
    assert peak(teacher_logits="cache") < peak()


def test_processes_share_what_is_sharded():
    alone, copies, shards, both = (
        estimate(CONFIGS["llama"](), CONFIGS["llama"](), settings(shard_teacher=teacher), processes, sharded=sharded)
        for processes, sharded, teacher in ((1, False, False), (4, False, False), (4, True, False), (4, True, True))
    )
    for name in ("weights that train", "other weights", "gradients", "Adam's moments"):
        assert shards.memory[name] == alone.memory[name] // 4 and copies.memory[name] == alone.memory[name]
    assert both.memory["teacher"] < shards.memory["teacher"] == alone.memory["teacher"]
    assert copies.memory["copies"] == copies.memory["gradients"] and not alone.memory["copies"]
    assert copies.tokens_per_step == 4 * alone.tokens_per_step


def test_operations_are_two_a_parameter_and_pass():
    result = llama(train="all", max_tokens=None, max_steps=5)
    config = CONFIGS["llama"]()
    matrices = sum(each.numel() for each in model_of(config).parameters() if each.ndim > 1)
    passed = matrices - config.vocab_size * config.hidden_size * (not config.tie_word_embeddings)
    assert result.tokens == 5 * 3 * BATCH * TOKENS
    assert result.total_flops == result.tokens * (6 + 2) * passed  # the student's and the teacher's
    assert llama(max_tokens=None, max_seconds=60).total_flops is None
    with pytest.raises(SurgeryError, match="dtype auto depends on the device"):
        llama(dtype="auto")


def test_a_dry_run_only_tells(checkpoints, tmp_path, monkeypatch, capsys):
    source, out = checkpoints("llama"), tmp_path / "out"
    (tmp_path / "fsdp2.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\n")
    arguments = ["heal", source, "--teacher", source, "--out", out]
    arguments += ["--dry-run", "--device", "cpu", "--max-tokens", "99999"]
    code, output, error = run_main(monkeypatch, capsys, *arguments)
    assert code == 0, error
    assert "time: about " in output and "Adam's moments" in output
    code, output, error = run_main(monkeypatch, capsys, *arguments, "--json", "--launcher", tmp_path / "fsdp2.yaml")
    plan = json.loads(output)
    assert plan["estimate"]["processes"] == 4 and plan["estimate"]["sharded"]
    assert plan["work"]["estimated_seconds"] is None and plan["disk"]["output_bytes"] > 0
    assert plan["settings"]["dtype"] == "fp32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp2.yaml"]
    out.mkdir()
    (out / "kept").touch()
    code, _, error = run_main(monkeypatch, capsys, *arguments)
    assert code == 1 and "exists" in error
