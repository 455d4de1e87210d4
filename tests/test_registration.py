"""Who imports the package has its model class in AutoModel, without torch before that is needed, in every order."""

import os
import subprocess
import sys

import pytest
from command_line import ROOT

SEEN = """
import sys
import surgery
loaded = sorted({"torch", "transformers"} & set(sys.modules))
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
config = CONFIG_MAPPING["surgery"]
print(loaded, MODEL_FOR_CAUSAL_LM_MAPPING[config].__name__, MODEL_FOR_CAUSAL_LM_MAPPING[config].on_device is not None)
"""
KNOWN = "SurgeryForCausalLM True"


def run(folder, *arguments) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_script_called_surgery_registers_it(tmp_path):
    script = tmp_path / "scripts" / "surgery.py"
    script.parent.mkdir()
    script.write_text(SEEN)
    # Its own folder is not searched, where the script would stand in the way of the package.
    launch = "import runpy, sys; sys.argv = [sys.argv[1]]; runpy.run_path(sys.argv[0], run_name='__main__')"
    assert run(tmp_path, "-c", launch, script) == f"[] {KNOWN}"


def test_a_program_started_with_m_registers_it(tmp_path):
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").write_text(SEEN)
    (package / "__main__.py").write_text("")
    assert run(tmp_path, "-m", "program") == f"[] {KNOWN}"


@pytest.mark.parametrize(
    "first",
    # Modules of transformers that load its auto classes before they are whole themselves.
    ["from transformers import LlamaForCausalLM", "from transformers import PreTrainedModel, AutoConfig"],
)
def test_it_is_registered_whatever_of_transformers_comes_first(first, tmp_path):
    assert run(tmp_path, "-c", f"import surgery\n{first}\n{SEEN}").endswith(KNOWN)


def test_it_is_registered_where_transformers_was_there_before(tmp_path):
    assert run(tmp_path, "-c", f"from transformers import AutoModelForCausalLM\n{SEEN}").endswith(KNOWN)
