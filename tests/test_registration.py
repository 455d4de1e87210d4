"""Registration: an import of the package has its model class in AutoModel, without torch before that is needed, in
every order."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
from command_line import ROOT

# Programs are forks of one process that has imported torch, which takes longest; they see it after `SEE_TORCH` only.
FORKS = f"""
import os, runpy, sys
import torch._dynamo, torch.distributed.tensor, scipy.optimize
sys.path.insert(0, {str(ROOT)!r})
sys.torch = {{name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}}
for argument in sys.argv[1:]:
    child = os.fork()
    if not child:
        for name in sys.torch:
            del sys.modules[name]
        if argument.endswith(".py"):
            # Its own folder is not searched, where the script would stand in the way of the package.
            sys.argv = [argument]
            runpy.run_path(argument, run_name="__main__")
        else:  # as the interpreter has it while it looks for the module
            sys.orig_argv, sys.argv = [sys.executable, "-m", argument], ["-m"]
            runpy.run_module(argument, run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, argument
"""
SEE_TORCH = "import sys; sys.modules.update(sys.torch)\n"
SEEN = f"""
import surgery
import sys
loaded = sorted({{"torch", "transformers"}} & set(sys.modules))
{SEE_TORCH}
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
known = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING["surgery"]]
print(sys.program, loaded, known.__name__, known.on_device is not None)
"""
PROGRAMS = {
    "scripts/surgery.py": SEEN,
    "program/__init__.py": SEEN,
    "before.py": f"{SEE_TORCH}from transformers import AutoModelForCausalLM\n{SEEN}",
    # Modules of transformers that load its auto classes before they are whole themselves.
    "model.py": f"import surgery\n{SEE_TORCH}from transformers import LlamaForCausalLM\n{SEEN}",
    "base.py": f"import surgery\n{SEE_TORCH}from transformers import PreTrainedModel, AutoConfig\n{SEEN}",
}


ALWAYS = ("program/__init__.py", "model.py")
"""Of them: each imports transformers, which takes three seconds."""


@pytest.fixture(scope="module")
def run_script(tmp_path_factory) -> Callable[[str], str]:
    """Gives what a program found loaded by the package, and which class is known."""

    @cache
    def run(names: tuple[str, ...]) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("programs")
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"import sys; sys.program = {name!r}\n{PROGRAMS[name]}")
            if name == "program/__init__.py":
                (folder / "program" / "__main__.py").write_text("")
        arguments = ["program" if "__init__" in name else name for name in names]
        process = subprocess.run([sys.executable, "-c", FORKS, *arguments], capture_output=True, text=True, cwd=folder)
        assert process.returncode == 0, process.stderr
        return dict(line.split(" ", 1) for line in process.stdout.splitlines())

    def get(name: str) -> str:
        return run(ALWAYS if name in ALWAYS else tuple(other for other in PROGRAMS if other not in ALWAYS))[name]

    return get


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_it_is_registered(run_script, name):
    loaded = "['torch', 'transformers']" if name in ("before.py", "model.py", "base.py") else "[]"
    assert run_script(name) == f"{loaded} SurgeryForCausalLM True"
