"""Verdict for transformers, which loads all conversions."""

from __future__ import annotations

import json

from surgery.engines.facts import OWN, Facts
from surgery.engines.trials import TRANSFORMERS
from surgery.engines.verdict import LOADS, LOADS_WITH, NOT_TRIED, Verdict

NAME = "transformers"
EAGER = ("gemma2",)
"""Families that need eager attention: the default of 5.19, SDPA, ignores the softcap of attention scores."""
PICTURES = "AutoModelForImageTextToText"
"""Auto class for vision-language models."""
EAGERLY = ', attn_implementation="eager"'


def verdict(facts: Facts, path: str) -> Verdict:
    """Return the verdict for ``from_pretrained``; the cache has the dtype of the weights."""
    fields = {"engine": NAME, "version": TRANSFORMERS.version, "device": TRANSFORMERS.device}
    own = facts.structure == OWN
    code = ", trust_remote_code=True" * own + EAGERLY * (facts.family in EAGER)
    auto = PICTURES if facts.pictures else "AutoModelForCausalLM"
    fields["command"] = f'{auto}.from_pretrained({json.dumps(path, ensure_ascii=False)}, dtype="auto"{code})'
    fields |= facts.cache(facts.number_bytes)
    if facts.kind not in TRANSFORMERS.kinds:
        reason = "no test covers its quantized weights" if facts.quantized else "no test covers its model class"
        return Verdict(**fields, status=NOT_TRIED, reason=reason)
    reason = f"ran in {TRANSFORMERS}" + ", with the code next to the weights" * own
    reason += "; without eager attention, 5.19 ignores its softcap" * (facts.family in EAGER)
    return Verdict(**fields, status=LOADS_WITH if code else LOADS, reason=reason)
