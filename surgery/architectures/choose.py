"""Choice of the class that carries a conversion, and its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surgery.architectures.deepseek_v3 import StockMLA
from surgery.architectures.own import OwnMLA
from surgery.architectures.spec import MLASpec
from surgery.common.errors import SurgeryError


@dataclass(frozen=True)
class Carrier:
    """A class that writes the conversion, with the reasons for it."""

    writer: StockMLA | OwnMLA
    reasons: tuple[str, ...]

    @property
    def stock(self) -> bool:
        """Return whether it is a class of transformers."""
        return isinstance(self.writer, StockMLA)


def choose_carrier(
    config: dict,
    spec: MLASpec,
    obstacles: Sequence[str],
    *,
    choice: str,
    latent_norm: str,
    head_sizes: tuple[int, int, int] | None,
    tied: bool,
) -> Carrier:
    """Stock ``deepseek_v3`` where it can carry the conversion, the custom model class otherwise.

    Args:
        obstacles: why stock cannot, :func:`surgery.architectures.deepseek_v3.obstacles`.
        head_sizes: to which stock heads are padded, see :class:`StockMLA`.
        tied: whether stock embeddings may be the output head too, as in the source.

    Raises:
        SurgeryError: "stock" is wanted and impossible.
    """
    if choice == "own":
        return Carrier(OwnMLA(spec), ("asked for",))
    if not obstacles:
        return Carrier(
            StockMLA.choose(config, spec, latent_norm, head_sizes, tied), ("stock deepseek_v3 carries it exactly",)
        )
    if choice == "stock":
        raise SurgeryError(f"stock deepseek_v3 cannot carry this model: {'; '.join(obstacles)}; use --carrier own")
    return Carrier(OwnMLA(spec), tuple(obstacles))
