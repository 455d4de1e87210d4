"""Reports that nobody meant well with, and what tables and cards make of them."""

import copy
import itertools
import json
from html.parser import HTMLParser

import pytest
import yaml
from hostile import MARKUP, OUTSIDE, cases, mutated, taken_or_refused
from hypothesis import example, given
from hypothesis import strategies as st
from sample_report import sample_report

from surgery.eval.report import markdown
from surgery.reporting.card import model_card
from surgery.reporting.front_matter import front_matter, of_source
from surgery.reporting.report import Report, previous_report

REPORT = sample_report(rows=2)
OWN = ('"><img src=x onerror=alert(1)>', "' onload='x", "</style><script>x</script>", "$x$", "a\n\n# b")
BREAKOUTS = st.sampled_from((*MARKUP, *OUTSIDE, *OWN)) | st.text(alphabet="<>&\"'`|$\n/scriptx =", max_size=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


class Elements(HTMLParser):
    """Names of elements."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attributes):
        self.found.add(tag)


def elements(html: str) -> set[str]:
    parser = Elements()
    parser.feed(html)
    return parser.found


def with_texts(value, texts):
    """A report whose free texts are others."""
    free = {"title", "command", "created", "device_name", "platform"}
    free |= {"path", "text", "source_sha256", "method"}
    if isinstance(value, dict):
        return {
            key: next(texts) if key in free and isinstance(inner, str) else with_texts(inner, texts)
            for key, inner in value.items()
        }
    return [with_texts(inner, texts) for inner in value] if isinstance(value, list) else value


@given(st.lists(BREAKOUTS, min_size=1, max_size=4), BREAKOUTS)
@cases(5, limit=2000)
def test_tables_escape_every_text(texts, name):
    report = with_texts(copy.deepcopy(REPORT), itertools.cycle(texts))
    report["rows"][1]["name"] = name
    for row in report["rows"]:
        row["results"]["generate"]["completions"][0]["prompt"] = texts[0]
    lines = markdown.render(report).splitlines()
    assert not elements("\n".join(line for line in lines if not line.startswith("    "))) - {"br"}
    assert len(lines) == len(markdown.render(REPORT).splitlines())


CONVERSION = {
    "source": {"path": "llama", "sha256": "00", "kv_heads": 2, "heads": 4, "head_dim": 8, "dequantised_from": None},
    "target": {"to": "mla", "method": "fisher", "model_type": "deepseek_v3", "reasons": ["stock"], "engines": {}}
    | {"kv_lora_ranks": [8], "rope_dim": 4},
    "kv": {"source_bytes_per_token": 64, "measured_bytes_per_token": 32.0, "ratio": 0.5},
    "ladder": [{"stage": stage, "loss": 1.0, "recall": 0.5} for stage in ("source", "reloaded")],
    "calibration": {"source": "builtin"},
    "command": "surgery convert llama",
}


WHOLE = {"settings": {}, "splits": [], "layers": [], "verification": {}, "environment": {}, "seconds": {}}
WHOLE |= {"peak_memory_bytes": 0}


def card(message, name):
    return model_card(Report(**message, **WHOLE), name)


@given(st.lists(BREAKOUTS, min_size=6, max_size=6))
@cases(7)
def test_cards_escape_every_text(texts):
    message, name = copy.deepcopy(CONVERSION), texts[0]
    message["source"]["path"], message["calibration"]["source"], message["command"] = texts[1], texts[4], texts[5]
    message["target"] |= {"reasons": [texts[2]], "method": texts[3]}
    files, plain = card(message, name), card(CONVERSION, "llama")
    assert len(files.splitlines()) == len(plain.splitlines())
    head, body = files.split("---\n", 2)[1:]
    assert yaml.safe_load(head).keys() == yaml.safe_load(plain.split("---\n", 2)[1]).keys()
    fences = body.split("```")
    assert len(fences) == 3
    outside = [part for text in (fences[0], fences[2]) for part in text.split("`")[::2]]
    assert not elements("".join(outside))


ODD = """\
license: 2024-99-99|license: 0b|license: {a: b}|license: [[mit]]|license: ["\\e[2J"]|license: !!binary "x"
license: !!python/name:os.system|? [a]|language: no|license: &a [*a]|license: 12:99:99|[]|license: "\\ud800"
""".replace("\n", "|").split("|")


@pytest.mark.parametrize("head", [*filter(None, ODD), "license: " + "[" * 1000, "license: " + "x" * 10**6])
def test_odd_front_matter(head, tmp_path):
    """The card of a source decides nothing but a few short texts in that of the result."""
    (tmp_path / "README.source.md").write_text(f"---\n{head}\n---\n# x\n")
    inherited = of_source(tmp_path)
    files = front_matter(Report.of({**WHOLE, **CONVERSION}), "name", inherited=inherited)
    read = yaml.safe_load(files.split("---\n")[1])
    assert {name: read[name] for name in inherited} == inherited and len(files) < 5000
    assert "\x1b" not in files and inherited.get("language", "no") == "no"


@given(mutated({**CONVERSION, "previous": CONVERSION}))
@example({**CONVERSION, "previous": {**CONVERSION, "source": None}})
@cases(12)
def test_conversions(folder, report):
    (folder / "surgery_report.json").write_text(json.dumps(report))
    taken_or_refused(lambda: previous_report(folder))
