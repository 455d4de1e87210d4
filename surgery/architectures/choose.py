"""Choice of the target architecture of an MLA conversion, and its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surgery.architectures.deepseek_v3 import StockMLA
from surgery.architectures.own import OwnMLA
from surgery.architectures.spec import MLASpec
from surgery.common.errors import SurgeryError


@dataclass(frozen=True)
class Carrier:
    """Writer for the chosen target architecture, and the reasons for the choice."""

    writer: StockMLA | OwnMLA
    reasons: tuple[str, ...]

    @property
    def stock(self) -> bool:
        """True for a stock transformers class."""
        return isinstance(self.writer, StockMLA)


def choose_carrier(
    config: dict,
    spec: MLASpec,
    obstacles: Sequence[str],
    *,
    choice: str,
    head_sizes: tuple[int, int, int] | None,
    tied: bool,
) -> Carrier:
    """Choose stock ``deepseek_v3`` where it can hold the conversion, without obstacles, else the custom model class.

    Stock heads are padded to ``head_sizes``; ``tied``: whether it may tie embeddings and output head, as the source
    does. Raises SurgeryError: ``choice`` is "stock", which cannot hold the conversion.
    """
    if choice == "own":
        return Carrier(OwnMLA(spec), ("set by --carrier own",))
    if not obstacles:
        return Carrier(StockMLA.choose(config, spec, head_sizes, tied), ("stock deepseek_v3 holds it exactly",))
    if choice == "stock":
        raise SurgeryError(
            f"stock deepseek_v3 cannot hold this model: {'; '.join(obstacles)}; drop --engine and --carrier stock"
        )
    return Carrier(OwnMLA(spec), tuple(obstacles))
