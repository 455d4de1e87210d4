"""Fixtures for all tests."""

import atexit
import gc
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before torch is imported, as in surgery.own_program, whose package would import it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    # On two cores, two workers of two threads each would mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if not any(Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")):
    # As below, but before the conftest files of folders named on the command line, which import transformers.
    os.environ.setdefault("TRITON_INTERPRET", "1")

STARTING_PROCESSES = (
    "test_processes.py",
    "test_python_api.py",
    "test_heal.py",
    "test_heads_recipe.py",
    "test_run.py",
    "test_plugins.py",
    "test_cli_evaluation.py",
    "test_recipe.py",
    "test_registration.py",
)

LOGGED_CONFIGS = {
    "transformers.configuration_utils": "PreTrainedConfig",
    "transformers.generation.configuration_utils": "GenerationConfig",
}


def pytest_configure(config):
    """Torch and what has to be set before tests are imported; not in the process that only deals tests out."""
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    gc.disable()  # until all tests are collected: what is imported stays
    import torch

    # No power is cut while tests run, and thousands of small files would wait for the disk.
    os.fsync = lambda file: None
    if not torch.cuda.is_available():
        # Before kernels are imported: without a GPU they run in Triton's interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if find_spec("triton"):
            import interpreter

            interpreter.make_quick()


def pytest_collection_modifyitems(items):
    """Files of a few long tests first: at the end one worker would do them while the other waits."""
    items.sort(key=lambda item: item.path.name not in STARTING_PROCESSES)
    # A million objects of packages and tests stay to the end: evaluations collect often, a third of a second each time.
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # not before: pytest collects garbage ten times as it ends
    # transformers formats every config that it makes, two a model, for a line of a log that nobody reads.
    for name, config in LOGGED_CONFIGS.items():
        if module := sys.modules.get(name):
            getattr(module, config).__repr__ = object.__repr__


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Gives the folder of a tiny checkpoint by family name, made once."""
    import torch
    from tiny_models import make_checkpoint

    make = cache(lambda name, dtype: make_checkpoint(tmp_path_factory.mktemp(name), name, dtype))
    return lambda name, dtype=torch.float32: make(name, dtype)


@pytest.fixture(scope="session")
def conversions(checkpoints, tmp_path_factory):
    """Gives what a tiny checkpoint became with some settings, converted once; to be read, not to be changed."""
    from conversions import convert_checkpoint

    @cache
    def get(name: str, settings, *dtype):
        return convert_checkpoint(checkpoints(name, *dtype), tmp_path_factory.mktemp("made") / name, settings)

    return get


@pytest.fixture(scope="session")
def picture_models(tmp_path_factory):
    """Gives the folder of a tiny vision-language model, made once."""
    from picture_models import make_model

    return cache(lambda name: make_model(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="session")
def tokenizer():
    """Return the tokenizer of the demo model; not to be changed."""
    from tiny_models import DEMO
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def short_decoding():
    """Evaluations count caches over 8 decoded tokens, not over the 64 of tests/eval, most of the time of tiny ones."""
    from surgery.eval import kv_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "GROWTH_STEPS", 8)
        yield


@pytest.fixture(scope="module")
def no_pictures():
    """Reports are written without plots, which take longer than to measure tiny models.

    tests/eval/test_report_plots.py draws plots, tests/evaluation/test_run.py those of an evaluation.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surgery.evaluation.output.save_plots", lambda *_: {})
        yield


@pytest.fixture
def no_gradients():
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def one_core():
    """Tiny models have no work for two cores; on a busy machine they would mostly wait for each other."""
    from surgery.transforms.algebra import torch_threads

    with torch_threads(1):
        yield
