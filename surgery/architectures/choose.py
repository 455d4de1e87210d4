"""Which class carries a conversion, and why."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.architectures import deepseek_v3
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
        """Whether it is a class of transformers."""
        return isinstance(self.writer, StockMLA)


def choose_carrier(
    config: dict,
    spec: MLASpec,
    *,
    experts: bool,
    mlp_bias: bool,
    beside: str | None = None,
    wanted: str = "auto",
    latent_norm: str = "auto",
    head_sizes: tuple[int, int, int] | None = None,
    tied: bool = True,
) -> Carrier:
    """Stock ``deepseek_v3`` where it can carry the conversion, the project's own class otherwise.

    Args:
        head_sizes: to which stock heads are padded, see :class:`StockMLA`.
        tied: whether stock embeddings may be the output head too, as in the source.

    Raises:
        SurgeryError: "stock" is wanted and impossible.
    """
    found = deepseek_v3.obstacles(config, spec, experts=experts, mlp_bias=mlp_bias, beside=beside)
    if wanted == "own":
        return Carrier(OwnMLA(spec), ("asked for",))
    if not found:
        return Carrier(
            StockMLA.choose(config, spec, latent_norm, head_sizes, tied), ("stock deepseek_v3 carries it exactly",)
        )
    if wanted == "stock":
        raise SurgeryError(f"stock deepseek_v3 cannot carry this model: {'; '.join(found)}; use --carrier own")
    return Carrier(OwnMLA(spec), tuple(found))
