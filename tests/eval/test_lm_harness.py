"""The harness' tasks give on a loaded model what the harness' own command line gives."""

import builtins
import copy
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from sessions import Bars
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.common.errors import SurgeryError
from surgery.eval.session import Session
from surgery.eval.tasks.lm_harness import LmHarnessTask
from surgery.running.processes import Processes

# Importing them would take a second of every process that collects tests.
pytestmark = pytest.mark.skipif(not (find_spec("lm_eval") and find_spec("datasets")), reason="needs lm_eval, datasets")

CHOICE = """
task: user_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
num_fewshot: 2
fewshot_split: test
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 3}}
"""
EXACT = """
task: user_exact
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: !function scoring.wanted
process_results: !function scoring.length
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 8}}
metric_list: [{{metric: length, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""
ROLLING = """
task: user_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
metadata: {{version: 1}}
"""
GROUP = """
group: user_group
task: [user_choice, user_exact, user_perplexity]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
metadata: {version: 1}
"""
SCORING = """
def wanted(doc):
    return doc["choices"][doc["answer"]]


def length(doc, results):
    return {"length": sum(map(ord, results[0]))}
"""
MADE = """
task: user_made
custom_dataset: !function made.documents
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: text
process_results: !function made.results
generation_kwargs: {until: ["x"], max_gen_toks: 1}
metric_list: [{metric: "4096", aggregation: !function made.mean, higher_is_better: true}]
metadata: {version: 1}
"""
MADE_CODE = """
from datasets import Dataset


def documents(tokenizer, max_seq_lengths=(4096,), **rest):
    assert tokenizer == "here"
    return {"test": Dataset.from_list([{"text": "a", "length": length} for length in max_seq_lengths])}


def results(doc, results):
    return {"4096": -1.0, str(doc["length"]): float(doc["length"])}


def mean(values):
    values = [value for value in values if value != -1]
    return sum(values) / len(values) if values else -1
"""
DOCUMENTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder of tasks over a local file."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "documents.jsonl"
    rows = [
        {
            "question": f"def f{i}(x):\n    return",
            "choices": [" x", f" x + {i}", " None\n"],
            "answer": i % 3,
            "text": f"import os\n\nvalue = os.path.join('a{i}', 'b')\n" * (i + 1),
        }
        for i in range(DOCUMENTS)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tasks(folder, data)
    return folder


def write_tasks(folder, data):
    for name, text in {"choice": CHOICE, "exact": EXACT, "rolling": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    (folder / "group.yaml").write_text(GROUP)
    (folder / "scoring.py").write_text(SCORING)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Keeps datasets' cache out of the home folder."""
    import datasets

    own, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, tmp_path_factory.mktemp("cache")
    yield datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = own


@pytest.fixture(scope="module")
def loaded(checkpoints, cache):
    path = checkpoints("llama")
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def session(tokenizer, **changes):
    return Session(tokenizer, Processes(), Bars(), **{"batch_size": 3, **changes})


@pytest.mark.slow
def test_equals_the_command_line(folder, loaded, cache, checkpoints, tmp_path):
    model, tokenizer = loaded
    ours = LmHarnessTask("user_group", folder).run(model, session(tokenizer))
    arguments = {"--model": "hf", "--model_args": f"pretrained={checkpoints('llama')},dtype=float32"}
    arguments |= {"--tasks": "user_group", "--include_path": folder, "--output_path": tmp_path}
    arguments |= {"--device": "cpu", "--batch_size": 3}
    command = [sys.executable, "-m", "lm_eval", "run", *(str(word) for pair in arguments.items() for word in pair)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache)}
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    run = subprocess.run(command, env={**os.environ, **offline, **threads}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = json.loads(next(tmp_path.rglob("results*.json")).read_text())
    expected = {}
    for name, values in {**theirs["results"], **theirs["groups"]}.items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if filter_name == "none" and not metric.endswith("_stderr"):
                stderr = values[f"{metric}_stderr,none"]
                label = metric if name == "user_group" else f"{name}/{metric}"
                expected[label] = (value, None if stderr == "N/A" else stderr)
    parts = ("choice/acc", "choice/acc_norm", "exact/length", "perplexity/word_perplexity", "perplexity/bits_per_byte")
    assert set(ours["metrics"]) == set(expected) == {"acc", *(f"user_{part}" for part in parts)}
    for name, (value, stderr) in expected.items():
        assert ours["metrics"][name]["value"] == pytest.approx(value, rel=1e-9, abs=0), name
        assert ours["metrics"][name]["stderr"] == (stderr and pytest.approx(stderr, rel=1e-9, abs=0)), name
    assert ours["metrics"]["user_exact/length"]["value"] > 0, "the model wrote nothing: the comparison says nothing"
    assert ours["versions"] == theirs["versions"]
    assert next(iter(ours["metrics"])) == "acc"


def test_a_single_task(folder, loaded):
    model, tokenizer = loaded
    bars_of = session(tokenizer)
    result = LmHarnessTask("user_choice", folder).run(model, bars_of)
    assert set(result["metrics"]) == {"acc", "acc_norm"}
    assert result["metrics"]["acc"]["value"] * DOCUMENTS == round(result["metrics"]["acc"]["value"] * DOCUMENTS)
    assert result["metrics"]["acc"]["stderr"] >= 0 and result["metrics"]["acc"]["higher_is_better"] is True
    assert (result["n_samples"], result["n_shot"], result["versions"]) == (DOCUMENTS, 2, {"user_choice": 3})
    assert [(phase["done"], phase["total"]) for phase in bars_of.progress.phases] == [(1, 1)]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_limit_and_fewshot(folder, loaded):
    model, tokenizer = loaded
    result = LmHarnessTask("user_choice", folder, num_fewshot=1).run(model, session(tokenizer, limit=4))
    assert (result["n_samples"], result["n_shot"]) == (4, 1)


def test_tasks_that_make_their_prompts_get_lengths_and_tokenizer(loaded, tmp_path):
    """Metrics of RULER's tasks are lengths, and -1 marks a length without prompts."""
    (tmp_path / "made.yaml").write_text(MADE)
    (tmp_path / "made.py").write_text(MADE_CODE)
    model, tokenizer = loaded
    task = LmHarnessTask("user_made", tmp_path, tokenizer="here", lengths=(16, 24))
    metrics = task.run(model, session(tokenizer))["metrics"]
    assert {name: each["value"] for name, each in metrics.items()} == {"16": 16.0, "24": 24.0}
    assert task.settings()["lengths"] == [16, 24]
    default = LmHarnessTask("user_made", tmp_path, tokenizer="here")
    assert list(default.run(model, session(tokenizer))["metrics"]) == ["4096"] and "lengths" not in default.settings()


def test_leaves_everything_as_it_was(folder, loaded, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where git would complain, which the harness starts
    model, tokenizer = copy.deepcopy(loaded)
    tokenizer.pad_token = None
    model.train()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    LmHarnessTask("user_exact", folder).run(model, session(tokenizer))
    assert model.training and all(module.training for module in model.modules())
    assert tokenizer.pad_token is None
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, (pointer, tensor) in before.items():
        assert after[name].data_ptr() == pointer and torch.equal(after[name], tensor)
    assert "fatal" not in "".join(capfd.readouterr())


def test_settings_name_what_was_run(tmp_path):
    folder, moved, edited = (tmp_path / name for name in ("folder", "moved", "edited"))
    for path in (folder, moved, edited):
        path.mkdir()
        write_tasks(path, "documents.jsonl")
        (path / "documents.jsonl").write_text("{}\n")
    (moved / "__pycache__").mkdir()
    (moved / "__pycache__" / "scoring.pyc").write_bytes(b"anything")
    (edited / "documents.jsonl").write_text("{}\n{}\n")
    (edited / "choice.yaml").write_text(
        (edited / "choice.yaml").read_text().replace("num_fewshot: 2", "num_fewshot: 3")
    )

    names = ("user_choice", "user_exact")
    settings = {name: LmHarnessTask(name, folder).settings() for name in names}
    json.dumps(settings)
    assert len({each["task"] for each in settings.values()}) == len(names)
    assert settings["user_choice"] != LmHarnessTask("user_choice", folder, num_fewshot=0).settings()
    for name in names:
        assert LmHarnessTask(name, moved).settings() == settings[name]
        assert LmHarnessTask(name, edited).settings()["folder_sha256"] != settings[name]["folder_sha256"]


def test_refuses_unknown_tasks_and_missing_folders_and_tells_other_failures(folder, monkeypatch, tmp_path, loaded):
    from surgery.eval.tasks import lm_harness

    # Without the harness' own 14,000 tasks, which take seconds to index.
    index = lm_harness._index
    monkeypatch.setattr(lm_harness, "_index", lambda *source: index(*source[:-1], False))
    with pytest.raises(SurgeryError, match=r"no task 'user_choise' .*tasks"):
        LmHarnessTask("user_choise", folder).settings()
    with pytest.raises(SurgeryError, match="nowhere does not exist"):
        LmHarnessTask("user_choice", tmp_path / "nowhere").settings()
    model, tokenizer = loaded
    (tmp_path / "gone.yaml").write_text(CHOICE.format(data=tmp_path / "gone.jsonl"))
    with pytest.raises(SurgeryError, match=r"^lm-eval:user_choice failed in the harness: \w+: .*gone\.jsonl"):
        LmHarnessTask("user_choice", tmp_path).run(model, session(tokenizer))


def test_asks_for_the_harness(monkeypatch):
    imported = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "lm_eval":
            raise ImportError("No module named 'lm_eval'")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SurgeryError, match=r'pip install "model-surgery\[eval\]"'):
        LmHarnessTask("hellaswag").settings()
