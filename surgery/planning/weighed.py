"""Protocol of a plan's candidates: a conversion, or a cache format that an engine has by itself."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from surgery.structures.context import ConversionContext


class Weighed(Protocol):
    """A candidate whose bytes are known.

    Attributes:
        to: conversion target; None where there is no conversion.
        asked: settings of the conversion beside the plan's own.
        name: unique among the candidates of a plan.
        config: config.json of what is served.
        kv_bytes: of all sequences at the plan's context.
        engines: each engine's verdict on the result.
        engine: whose own format it is; None for a conversion. ``status``: how its arithmetic was checked.
    """

    @property
    def to(self) -> str | None: ...
    @property
    def asked(self) -> dict[str, Any]: ...
    @property
    def name(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def kv_bytes(self) -> float: ...
    @property
    def engines(self) -> dict[str, dict]: ...
    @property
    def engine(self) -> str | None: ...
    @property
    def status(self) -> str | None: ...

    def command(self, called: str) -> str:
        """Command line that converts or serves the source ``called`` so."""

    def leaves(self, layer: int) -> bool:
        """Return whether a layer stays unchanged."""

    def group(self, layer: int) -> range:
        """The layers that only run together with this one."""

    def attention(self, work: ConversionContext, layer: int) -> nn.Module:
        """Simulated attention of a layer."""

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Carry [N, T, D], in place, through layers that only run together."""
