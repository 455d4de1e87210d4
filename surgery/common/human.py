"""Numbers as people read them. JSON keeps the exact ones."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping

from surgery.common.errors import SurgeryError
from surgery.common.visible import visible


def size(count: float) -> str:
    """Bytes in binary units with one decimal: ``3.0 KiB``; below 1 KiB as they are."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f} B"


def duration(seconds: float) -> str:
    """Seconds as ``12.3 s``, ``4 min 05 s`` or ``2 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02d} min"


def seconds_of(text: str | float, option: str) -> float:
    """Seconds of a duration such as ``300``, ``300s``, ``5m`` or ``1h30m``.

    Args:
        option: that it was given to, for the message.

    Raises:
        SurgeryError: it is none, or no time at all.
    """
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", str(text))
    hours, minutes, rest = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    if not (seconds := 3600 * hours + 60 * minutes + rest):
        raise SurgeryError(f"{option} {text}: is no duration; write it like 5m, 300s or 1h30m")
    return seconds


def count(value: float) -> str:
    """A large number in words of thousands: ``5.5M``, ``8.0B``, ``1.2T``; below a thousand as it is."""
    for unit, scale in (("P", 10**15), ("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if value >= scale:
            return f"{value / scale:,.1f}{unit}"
    return f"{value:,.0f}"


def decimal(value: float | None, digits: int) -> str:
    """A measured value, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def perplexity(loss: float | None) -> float | None:
    """exp of a mean loss in nats a token; infinite where that is no number that a machine has."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return math.inf


def perplexity_text(value: float) -> str:
    """A perplexity with four digits or so: ``9.762``, ``64.12``, ``1,234``."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def with_perplexity(loss: float | None) -> str:
    """A loss and its perplexity, ``2.2785 (9.762)``; a dash where there is none."""
    return "-" if loss is None else f"{loss:.4f} ({perplexity_text(perplexity(loss))})"


def cost(loss_increase: float, recall: tuple[float | None, float | None] = (None, None)) -> str:
    """A difference of losses in nats per token, as a perplexity too; and recall before and after, if there is any."""
    before, after = recall
    recall_part = (
        f", recall {decimal(before, 2)} → {decimal(after, 2)}" if before is not None and after is not None else ""
    )
    return f"{loss_increase:+.4f} nats per token (perplexity {perplexity(loss_increase) - 1:+.1%}){recall_part}"


def loss_of_stage(row: dict) -> str:
    """The loss of a stage of a conversion; of one that must equal the source, how far its logits are off."""
    if row.get("logit_difference") is not None:
        return f"the source's (logits: {row['logit_difference']:.0e})"
    texts = f", from {row['sequences']} texts" if row.get("sequences") else ""
    return f"{with_perplexity(row['loss'])}{texts}"


def share(value: float | None) -> str:
    """A share of one as a percentage, small ones with more digits; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.1%}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def shares_at(ratios: Mapping[str, float] | None, ratio: float) -> str:
    """A share of KV bytes, or those at several lengths where it depends on the length: "52.1% at 4k, 21.0% at 32k".

    Args:
        ratios: by tokens.
        ratio: what is shown alone where ``ratios`` are within 5% of it, or not known.
    """
    if not ratios or all(abs(each - ratio) <= 0.05 * ratio for each in ratios.values()):
        return share(ratio)
    names = {tokens: f"{int(tokens) // 1024}k" if int(tokens) % 1024 == 0 else f"{int(tokens):,}" for tokens in ratios}
    return ", ".join(f"{share(value)} at {names[tokens]}" for tokens, value in ratios.items())


def per_token(count_: float) -> str:
    """KV bytes of one token, exact as far as a page has room: ``3,072 (3.0 KiB)``."""
    return f"{count_:,.0f} B" if count_ < 1024 else f"{count_:,.0f} B ({size(count_)})"


def origin(name: str, dequantised_from: str | None) -> str:
    """A source's name, and what its weights were dequantized from if they were: ``a.gguf (dequantized from Q4_1)``."""
    return name if dequantised_from is None else f"{name} (dequantized from {dequantised_from})"


def short(value: float | None) -> str:
    """Two digits of an error, or a dash where nothing predicts it."""
    return "-" if value is None else f"{value:.2g}"


def one_line(text: object) -> str:
    """Text that stays on its line."""
    return " ".join(visible(text).splitlines())


def in_markdown(text: object) -> str:
    """Text in Markdown that stays in its line and its cell, and is no markup but that of letters."""
    return html.escape(one_line(text), quote=False).replace("|", "\\|").replace("`", "'")


def in_code(text: object) -> str:
    """Text between backticks or in a block of code, which it cannot end."""
    return one_line(text).replace("`", "'")


def formats_of(kv_cache: dict | list) -> str:
    """The formats of a quantized cache, as a config's ``kv_cache`` has them of all layers or of each."""
    if isinstance(kv_cache, dict):
        return kv_cache["format"]
    return f"{', '.join(sorted({entry['format'] if entry else 'exact' for entry in kv_cache}))} by layer"
