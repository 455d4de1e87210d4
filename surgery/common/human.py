"""Human-readable formatting of numbers; JSON output keeps exact values."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping

from surgery.common.errors import SurgeryError
from surgery.common.visible import visible


def size(count: float) -> str:
    """Format bytes in binary units with one decimal, ``3.0 KiB``; below 1 KiB as a whole number, ``512 B``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f} B"


def duration(seconds: float) -> str:
    """Format seconds as ``12.3 s``, ``4 min 05 s`` or ``2 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02d} min"


def seconds_of(text: str | float, option: str) -> float:
    """Parse a duration such as ``300``, ``300s``, ``5m`` or ``1h30m``, passed to the flag ``option``, to seconds.

    Raises SurgeryError: the text is not a duration, or is zero.
    """
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", str(text))
    hours, minutes, rest = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    if not (seconds := 3600 * hours + 60 * minutes + rest):
        raise SurgeryError(f"{option} {text}: not a duration; write it like 5m, 300s or 1h30m")
    return seconds


def count(value: float) -> str:
    """Abbreviate a large number: ``5.5M``, ``8.0B``, ``1.2T``; below a thousand as a whole number."""
    for unit, scale in (("P", 10**15), ("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if value >= scale:
            return f"{value / scale:,.1f}{unit}"
    return f"{value:,.0f}"


def decimal(value: float | None, digits: int) -> str:
    """Format a value with a fixed number of decimals; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def perplexity(loss: float | None) -> float | None:
    """Compute the perplexity, exp of a mean loss in nats per token; infinite if it overflows."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return math.inf


def perplexity_text(value: float) -> str:
    """Format a perplexity with about four digits: ``9.762``, ``64.12``, ``1,234``."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def with_perplexity(loss: float | None) -> str:
    """Format a loss and its perplexity, ``2.2785 (9.762)``; a dash for None."""
    return "-" if loss is None else f"{loss:.4f} ({perplexity_text(perplexity(loss))})"


def cost(loss_increase: float, recall: tuple[float | None, float | None] = (None, None)) -> str:
    """Format a loss increase in nats per token and as a change of perplexity, with recall before and after if known."""
    before, after = recall
    recall_part = (
        f", recall {decimal(before, 2)} → {decimal(after, 2)}" if before is not None and after is not None else ""
    )
    return f"{loss_increase:+.4f} nats per token (perplexity {perplexity(loss_increase) - 1:+.1%}){recall_part}"


def loss_of_stage(row: dict) -> str:
    """Format the loss after a conversion stage; for a lossless stage, how far its logits differ from the source's."""
    if row.get("logit_difference") is not None:
        return f"the source's (logits: {row['logit_difference']:.0e})"
    texts = f", from {row['sequences']} texts" if row.get("sequences") else ""
    return f"{with_perplexity(row['loss'])}{texts}"


def share(value: float | None) -> str:
    """Format a share as a percentage, values below 0.1% with two significant digits; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.1%}" if abs(value) >= 0.001 or value == 0 else f"{100 * value:.2g}%"


def shares_at(ratios: Mapping[str, float] | None, ratio: float) -> str:
    """Format a KV ratio, by context length if it depends on it: "52.1% at 4k, 21.0% at 32k".

    Args:
        ratios: KV ratio by number of tokens, or None.
        ratio: the only value shown if all ``ratios`` are within 5% of it, or unknown.
    """
    if not ratios or all(abs(each - ratio) <= 0.05 * ratio for each in ratios.values()):
        return share(ratio)
    names = {tokens: f"{int(tokens) // 1024}k" if int(tokens) % 1024 == 0 else f"{int(tokens):,}" for tokens in ratios}
    return ", ".join(f"{share(value)} at {names[tokens]}" for tokens, value in ratios.items())


def per_token(count_: float) -> str:
    """Format the KV bytes of a token, exact and in binary units: ``3,072 B (3.0 KiB)``."""
    return f"{count_:,.0f} B" if count_ < 1024 else f"{count_:,.0f} B ({size(count_)})"


def origin(name: str, dequantised_from: str | None) -> str:
    """Format a source's name with the format it was dequantized from: ``a.gguf (dequantized from Q4_1)``."""
    return name if dequantised_from is None else f"{name} (dequantized from {dequantised_from})"


def short(value: float | None) -> str:
    """Format an error with two significant digits; a dash for None."""
    return "-" if value is None else f"{value:.2g}"


def one_line(text: object) -> str:
    """Join the lines of a text and escape its control characters."""
    return " ".join(visible(text).splitlines())


def in_markdown(text: object) -> str:
    """Escape a text for a Markdown table cell: one line, no HTML, no cell separators or backticks."""
    return html.escape(one_line(text), quote=False).replace("|", "\\|").replace("`", "'")


def in_code(text: object) -> str:
    """Escape a text for inline code or a code block: one line without backticks."""
    return one_line(text).replace("`", "'")
