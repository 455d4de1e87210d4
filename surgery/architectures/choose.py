"""Which class carries a conversion, why, and which engines load the result."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.architectures import deepseek_v3
from surgery.architectures.deepseek_v3 import StockMLA
from surgery.architectures.own import OwnMLA
from surgery.architectures.spec import MLASpec
from surgery.errors import SurgeryError

# r + ρ for which vLLM's and SGLang's GPU kernels for MLA are built; others run in Triton or not at all.
ENGINE_WIDTHS = (320, 576)


@dataclass(frozen=True)
class Carrier:
    """A class that writes the conversion, with the reasons for it."""

    writer: StockMLA | OwnMLA
    reasons: tuple[str, ...]

    @property
    def stock(self) -> bool:
        return isinstance(self.writer, StockMLA)


def choose_carrier(
    config: dict, spec: MLASpec, *, experts: bool, mlp_bias: bool, wanted: str = "auto", latent_norm: str = "auto"
) -> Carrier:
    """Stock ``deepseek_v3`` where it can carry the conversion, the project's own class otherwise.

    Raises:
        SurgeryError: "stock" is wanted and impossible.
    """
    found = deepseek_v3.obstacles(config, spec, experts=experts, mlp_bias=mlp_bias)
    if wanted == "own":
        return Carrier(OwnMLA(spec), ("asked for",))
    if not found:
        return Carrier(StockMLA.choose(config, spec, latent_norm), ("stock deepseek_v3 carries it exactly",))
    if wanted == "stock":
        raise SurgeryError(f"stock deepseek_v3 cannot carry this model: {'; '.join(found)}; use --carrier own")
    return Carrier(OwnMLA(spec), tuple(found))


def engines(carrier: Carrier, config: dict) -> dict[str, str]:
    """For every engine "yes", or what stands in the way.

    Established by running tiny models (transformers 5.23, vLLM 0.32 and llama.cpp of 2026-10 on the CPU) and, for
    SGLang 0.5.23, by reading its code.
    """
    if not carrier.stock:
        return {
            "transformers": "yes, with this package imported or trust_remote_code=True",
            "vLLM": "no: own model class",
            "SGLang": "no: own model class",
            "llama.cpp": "no: own model class",
        }
    writer = carrier.writer
    hard = []
    if writer.attention_bias:
        hard.append("drops attention biases")
    if writer.theta is None:
        hard.append("replaces the frequency list by YaRN")
    width = writer.rank + writer.rope_dim
    widths = "" if width in ENGINE_WIDTHS else f" (GPU kernels want r + rope of 320 or 576, this is {width})"
    llama = ["refuses attention biases"] if writer.attention_bias else []
    if writer.theta is None:
        llama.append("ignores the frequency list")
    if config.get("hidden_act", "silu") != "silu":
        hard.append("takes SiLU only")
        llama.append("takes SiLU only")
    return {
        "transformers": "yes",
        "vLLM (transformers backend)": "yes",
        "vLLM": f"no: {', '.join(hard)}" if hard else f"yes{widths}",
        "SGLang": f"no: {', '.join(hard)}" if hard else f"yes{widths}",
        "llama.cpp": f"no: {', '.join(llama)}" if llama else "yes",
    }
