"""`python -m surgery_vllm.serve`, as far as it goes without vLLM; tests/engines starts vLLM by it."""

import json
import socket
import sys

import pytest

from surgery_vllm import serve


@pytest.fixture
def installed(monkeypatch):
    """An environment that has vLLM and our plugin."""
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr("surgery_vllm.config._vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(serve, "entry_points", lambda group: type("Found", (), {"names": {serve.PLUGIN}}))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.fixture
def model(tmp_path):
    latent = {"kind": "latent", "kv_lora_rank": 4, "rope_inv_freq": [1.0], "key_norm_eps": None}
    settings = {
        "model_type": "surgery",
        "base_model_type": "llama",
        "num_hidden_layers": 1,
        "attention_layers": [latent],
    }

    def written(**changes) -> str:
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        return str(tmp_path)

    return written


def refusal(model: str, port: int = 0) -> str:
    with pytest.raises(serve.Refused) as error:
        serve.check(model, "127.0.0.1", port)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_can_be_served_is_not_refused(installed, model):
    serve.check(model(), "127.0.0.1", 0)
    serve.check(model(), "", 0)


def test_an_environment_without_vllm(model):
    assert "no vLLM" in refusal(model())


def test_another_version_and_another_structure(installed, model, monkeypatch):
    monkeypatch.setattr("surgery_vllm.config._vllm_version", lambda: "0.33.0")
    assert "vLLM 0.32, not 0.33.0" in refusal(model())
    serve.check(model(model_type="llama"), "127.0.0.1", 0)  # no plugin is asked of it


def test_a_plugin_that_vllm_does_not_find(installed, model, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "leaves out model_surgery" in refusal(model())
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(serve, "entry_points", lambda group: type("Found", (), {"names": set()}))
    assert "install model-surgery in this environment" in refusal(model())


def test_a_port_in_use(installed, model):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"port {port} of 127.0.0.1: Address already in use" in refusal(model(), port)


@pytest.mark.parametrize(
    ("host", "port", "setting"), [("", 99999, "port"), ("127.0.0.1", -1, "port"), ("no.such.invalid", 0, "host")]
)
def test_a_port_or_host_that_does_not_exist(host, port, setting, installed, model, monkeypatch, capsys):
    with pytest.raises(serve.Refused) as error:
        serve.check(model(), host, port)
    assert error.value.setting == setting
    monkeypatch.setattr(sys, "argv", ["serve", model(), "--host", host, "--port", str(port)])
    assert serve.main() == 2
    assert capsys.readouterr().err == f"error: {error.value}\n"


def test_no_checkpoint(installed, tmp_path):
    assert "config.json is missing" in refusal(str(tmp_path))


LOG = """\
(EngineCore pid=7) ERROR 11-25 03:00:00 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-25 03:00:00 [core.py:1100]   File "core.py", line 3, in <module>
(EngineCore pid=7) ERROR 11-25 03:00:00 [core.py:1100] ValueError: To serve at least one request, more is needed
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""
CHECKED = """\
(APIServer pid=6) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=6)   Value error, no such thing [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (LOG, "To serve at least one request, more is needed"),
        (CHECKED, "no such thing"),
        ("", "vLLM ended with status 3"),
    ],
)
def test_a_failure_ends_in_its_reason(log, message, capfd):
    assert serve.run([sys.executable, "-c", f"import sys; sys.stderr.write({log!r}); sys.exit(3)"]) == 3
    out, err = capfd.readouterr()
    assert (out, err) == (log, f"error: {message}\n")
    assert serve.run([sys.executable, "-c", "print('ValueError: told and caught')"]) == 0
    assert capfd.readouterr().err == ""
