"""DeepSpeed ZeRO-3 gives the numbers of one process and resumes from its checkpoints.

accelerate finds no processes under DeepSpeed where there is no accelerator. Launched with a settings file, this file is
a process that tells it of gloo; all else is its own code and DeepSpeed's, on the CPU.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from healing import heal_settings, settings_file, sharded_as_one
from tiny_models import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install -e '.[zero3]'"),
]


def sharded_process(file: str) -> int:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    from surgery.training import heal, loop

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)

    def run(self):
        assert self._t.accelerator.distributed_type == DistributedType.DEEPSPEED
        assert all(hasattr(each, "ds_id") for each in self._t.module.parameters())  # those that ZeRO-3 has sharded
        return real(self)

    real, loop.Loop.run = loop.Loop.run, run
    return heal.main(["--config", file])


@pytest.fixture
def models(tmp_path):
    return [make_checkpoint(tmp_path / name, "llama", seed=seed) for seed, name in enumerate("ts")]


def launch(folder: Path, values: dict) -> subprocess.CompletedProcess:
    """A healing by the configuration that ships, by two processes and in fp32."""
    config = yaml.safe_load((ROOT / "configs" / "accelerate" / "zero3.yaml").read_text(encoding="utf-8"))
    (folder / "zero3.yaml").write_text(yaml.safe_dump(config | {"num_processes": 2, "mixed_precision": "no"}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "zero3.yaml")]
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command += [__file__, str(settings_file({**values, "device": "auto"}))]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_sharded_run_is_that_of_one_process(tmp_path, models):
    teacher, student = models
    sharded_as_one(tmp_path, student, teacher, lambda values: launch(tmp_path, values), alone={})


def test_rules_of_stock_mla_are_refused(tmp_path, models):
    teacher, student = models
    (tmp_path / "rules.json").write_text('{"*.k_proj.weight": [0, -1]}')
    process = launch(tmp_path, heal_settings(tmp_path, student, teacher, entry_factors=str(tmp_path / "rules.json")))
    assert process.returncode != 0 and "use fsdp2.yaml" in process.stderr


if __name__ == "__main__":
    sys.exit(sharded_process(sys.argv[1]))
