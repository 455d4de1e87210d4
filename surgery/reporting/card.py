"""Model card of a converted checkpoint, rendered from its report."""

from __future__ import annotations

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.human import in_code, in_markdown, origin
from surgery.common.tables import markdown
from surgery.common.tables.table import Column, Table
from surgery.engines.in_transformers import EAGER, EAGERLY, PICTURES
from surgery.engines.table import support_lines
from surgery.engines.verdict import ruin_warning
from surgery.reporting.adapters import adapters_section
from surgery.reporting.front_matter import front_matter, reads_pictures
from surgery.reporting.healing_table import gap_closed, quality_table, stage_facts, stages
from surgery.reporting.quality import before_and_after, healed_table, stages_table, useless_message

LOADING = {
    "stock": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto"{eagerly})
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
    PICTURES: """\
from transformers import {pictures}, AutoProcessor

model = {pictures}.from_pretrained("{name}", dtype="auto")
processor = AutoProcessor.from_pretrained("{name}")""",
    "surgery": """\
# Registers the model class. Without the package, load the model with trust_remote_code=True, and the
# tokenizer, which needs no code, with trust_remote_code=False, so that transformers does not ask.
import surgery
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
    "surgery_pictures": """\
import surgery  # registers the model class; without the package pass trust_remote_code=True
from transformers import {pictures}, AutoProcessor

model = {pictures}.from_pretrained("{name}", dtype="auto")
processor = AutoProcessor.from_pretrained("{name}")""",
}


def model_card(report, name: str, *, base_model: str | None = None, inherited: dict | None = None) -> str:
    """Render the README.md of a converted checkpoint."""
    source, target, kv = report.source, report.target, report.kv
    called = target.get("called", target["to"])
    kv_bytes = kv["source_bytes_per_token"], kv["measured_bytes_per_token"]
    engines = markdown.render(Table.of(["engine", "loads"], support_lines(target["engines"]).items()))
    model_type = target["model_type"]
    eagerly = EAGERLY if model_type in EAGER else ""
    way = PICTURES if reads_pictures(target) and model_type not in LOADING else model_type
    fields = {"name": in_code(name).replace('"', "'"), "eagerly": eagerly, "pictures": PICTURES}
    loading = LOADING.get(way, LOADING["stock"]).format(**fields)
    made_from = origin(base_model or source.get("hub") or source["path"], source.get("dequantised_from"))
    return f"""{front_matter(report, name, base_model=base_model, inherited=inherited)}
# {in_markdown(name)}

{in_markdown(made_from)} with its attention rewritten to
{in_markdown(called)} by model-surgery {report.to_dict()["surgery_version"]}. {_describe_training(report)}

{markdown.render(before_and_after(kv_bytes, report.ladder, ratio_at=kv.get("ratio_at")))}

Class `{in_code(target["model_type"])}` ({in_markdown("; ".join(target["reasons"]))}),
{_describe_cache(source, target)}{_describe_rows(target)}, method
`{in_code(target["method"])}`. The KV bytes were measured on live caches.

```python
{loading}
```
{_warnings(target)}
## Where the loss comes from

{markdown.render(stages_table(report.ladder))}

{_describe_losses(report.calibration)}

{_healing_section(report.healing)}## Engines

{engines}

{adapters_section(target.get("adapters"))}## Provenance

Source weights sha256 `{in_code(source["sha256"])}`, command `{in_code(report.command or "Python API")}`; settings,
versions and per-layer errors are in `surgery_report.json`. The license of the source applies; its own card, if any, is
`README.source.md`.{_source_code(report)}
"""


def _warnings(target: dict) -> str:
    """Render a warning on formats that ruin the checkpoint, and one on layers that the conversion ruined."""
    formats, layers = target.get("ruined_by"), target.get("useless_layers")
    paragraphs = [*([ruin_warning(formats)] if formats else []), *([useless_message(layers)] if layers else [])]
    return "".join(f"\n{in_markdown(text)}\n" for text in paragraphs)


def _describe_training(report) -> str:
    if report.healing is not None:
        tokens = sum(stage["tokens"] for stage in stages(report.healing))
        return f"It was healed by distillation: {tokens:,} tokens."
    if report.calibration.get("source") == NO_CALIBRATION:
        return "It was made from the weights alone, without text and without training."
    return "It was calibrated, not trained."


def _describe_losses(calibration: dict) -> str:
    """Describe the text on which the losses in the stages table were measured."""
    source, share = calibration.get("source"), calibration.get("recall")
    if source == NO_CALIBRATION:
        return "Without text no loss was measured; `surgery eval` measures it."
    sentence = (
        f"Losses are nats per token on held-out calibration text ({in_markdown(source)}), recall is the\n"
        "share of planted five-digit keys that the model repeats correctly. "
    )
    if isinstance(share, float) and share:
        sentence += f"{share:.0%} of the sequences have planted facts and questions about them; "
        sentence += "`surgery eval` measures plain text."
    return sentence


def _healing_section(healing: dict | None) -> str:
    """Render the section on healing: losses of source, conversion and result, and the cost of each stage."""
    if healing is None:
        return ""
    paragraphs = ["## Healing\n"]
    table = quality_table(healing)
    if table:
        paragraphs.append(markdown.render(healed_table(table)))
        closed = gap_closed(table)
        share = "" if closed is None else f" {closed:.0%} of the conversion's loss increase was recovered."
        paragraphs += [f"\nLosses on held-out text.{share} The figures above are the conversion's.\n"]
    paragraphs.append(markdown.render(_stage_table(healing)))
    return "\n".join(paragraphs) + "\n\nAll settings are in `surgery_report.json`, every step in `heal.jsonl`.\n\n"


def _source_code(report) -> str:
    code = report.source_files.get("code") if isinstance(report.source_files, dict) else None
    if not code or not isinstance(code, list):
        return ""
    return f"\nCode files of the source, which were not reviewed: {', '.join(f'`{in_code(name)}`' for name in code)}."


def _describe_cache(source: dict, target: dict) -> str:
    """Describe the cached content of a token in words; targets of earlier versions may have none of these entries."""
    if "full_heads" in target:
        streaming = target["heads"] - target["full_heads"]
        window = f"{target['sinks']} first and {target['recent']} recent tokens"
        return f"{streaming} of {target['heads']} KV heads stream over {window}"
    if "kv_heads" in target:
        heads = target["kv_heads"]
        heads_text = _range(heads) if isinstance(heads, list) else heads
        return f"{heads_text} KV heads instead of {source['kv_heads']}"
    if "ranks" in target:
        exact = (
            f", {target['window']} recent and {target['sinks']} first tokens in full precision"
            if target.get("window")
            else ""
        )
        return f"latents of rank {_range(target['ranks'])}{exact}"
    if "kv_lora_ranks" not in target:
        return "keys and values"
    rank = _range(target["kv_lora_ranks"])
    rotated = _range(target.get("rope_dims") or [target["rope_dim"]])  # reports of 0.1 have a single value
    return f"latent rank {rank}, {rotated} rotary dimensions"


def _describe_rows(target: dict) -> str:
    """Describe packed rows in words; empty for other caches."""
    if not (rows := target.get("row_bytes")):
        return ""
    first = f"the first {target['first_tokens']} tokens in full precision"
    return f" in packed rows of {_range(rows)} bytes per token, {first}"


def _range(numbers: list[int]) -> str:
    """Format the value of all layers, or their minimum and maximum."""
    least, greatest = min(numbers), max(numbers)
    return str(least) if least == greatest else f"{least} to {greatest}"


def _stage_table(healing: dict) -> Table:
    columns = [
        Column("stage"),
        Column("trains", key="trains"),
        Column("objective", key="objective"),
        Column("learning rate", "", lambda value: f"{value:g}", key="learning_rate"),
        Column("rows per step", align="left", key="rows"),
        Column("data", key="data"),
        Column("steps", "", lambda value: f"{value:,}", key="steps"),
        Column("tokens", "", lambda value: f"{value:,}", key="tokens"),
        Column("time", "", lambda value: f"{value:,.0f} s", key="seconds"),
        Column("on", align="left", key="machine"),
    ]
    facts = enumerate(stage_facts(healing), 1)
    return Table(columns, [(number, *(each[column.key] for column in columns[1:])) for number, each in facts])
