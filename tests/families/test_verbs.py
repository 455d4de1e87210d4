"""Every command on every family, as typed: a conversion is refused in one line, or its result goes through the
others."""

import pytest
from command_line import run_main
from tiny_models import CONFIGS

from surgery.structures.registry import TARGETS

pytestmark = pytest.mark.slow

TEXT = ["--calibration-tokens", "256", "--calibration-length", "64"]
QUICK = [*TEXT, "--held-out", "1"]
ASKED = {"hybrid": ["--streaming", "1.0"]}
SMALL = ["--windows", "2", "--length", "64", "--decoded", "8", "--recall-prompts", "2"]


@pytest.mark.parametrize("family", CONFIGS)
def test_verbs_end_in_a_result_or_a_line(checkpoints, tmp_path, monkeypatch, capsys, family):
    source = checkpoints(family)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code, _, err = run_main(monkeypatch, capsys, *arguments)
        refused = [line for line in err.splitlines() if line.startswith("surgery: error:")]
        assert len(refused) == bool(code), err
        return code

    assert not run("inspect", source) and not run("doctor", source)
    run("plan", source, "--kv-ratio", "0.5", *TEXT)
    results = [to for to in TARGETS if not run("convert", source, "--to", to, "--out", to, *ASKED.get(to, QUICK))]
    assert "mla" in results or family == "phi4_mini"  # whose frequencies change with the length of the text
    for to in results:
        assert not any(run(verb, to) for verb in ("doctor", "verify", "inspect"))
        assert not run("eval", to, "--baseline", source, *SMALL)
