"""A sharded run gives the numbers of one process, resumes from its checkpoints, and shards what it should.

accelerate has FSDP on accelerators only. Run with a settings file by `torchrun`, this file is a process that has it on
the CPU all the same: accelerate's own code for FSDP2, and PyTorch's, with gloo.
"""

import json
import sys

import pytest
from healing import settings_file, sharded_as_one
from processes import torchrun
from safetensors.torch import load_file
from tiny_models import make_checkpoint
from torch.distributed import fsdp

KEYS = "model.layers.0.self_attn.k_proj.weight"


def sharded_process(file: str) -> int:
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.tensor import DTensor

    from surgery.training import heal, loop

    make = heal.open_accelerator

    def accelerator(settings):
        result = make(settings)
        how = {"auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **how)
        result.state.distributed_type, result.state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # every new state starts from this one
        return result

    def run(self):
        assert all(isinstance(each, DTensor) for each in self._t.module.parameters())
        teacher = self._t.accelerator.unwrap_model(self._t.module)._teacher[0].model
        assert {isinstance(each, DTensor) for each in teacher.model.layers.parameters()} == {
            self._t.settings.shard_teacher
        }
        return real(self)

    real, loop.Loop.run = loop.Loop.run, run
    heal.open_accelerator = accelerator
    return heal.main(["--config", file])


@pytest.mark.slow
def test_a_sharded_run_is_that_of_one_process(tmp_path):
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no FSDP2")
    teacher, student = (make_checkpoint(tmp_path / name, "llama", seed=seed) for seed, name in enumerate("ts"))
    rules = tmp_path / "rules.json"
    size = load_file(student / "model.safetensors")[KEYS].shape[0]
    rules.write_text(json.dumps({KEYS: {"rows": [0, *[1] * (size - 2), 0]}}))

    def launch(values):
        return torchrun(__file__, settings_file(values))

    sharded_as_one(tmp_path, student, teacher, launch, alone={"shard_teacher": True}, entry_factors=str(rules))


if __name__ == "__main__":
    sys.exit(sharded_process(sys.argv[1]))
