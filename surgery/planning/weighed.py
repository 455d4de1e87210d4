"""Protocol of a plan's candidates: conversions, and an engine's own cache formats."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from surgery.structures.context import ConversionContext


class Weighed(Protocol):
    """Candidate with known KV bytes.

    Attributes:
        to: conversion target; None for an engine's own cache format.
        asked: settings of the conversion in addition to the plan's.
        name: unique name among the candidates of a plan.
        config: config.json of the served model.
        kv_bytes: KV bytes of all sequences at the plan's context.
        engines: each engine's verdict on the result.
        engine: engine of the cache format; None for a conversion. ``status``: how the simulated arithmetic was checked.
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
        """Return the command line that converts or serves the source; ``called`` names the source in it."""

    def leaves(self, layer: int) -> bool:
        """Return whether a layer stays unchanged."""

    def group(self, layer: int) -> range:
        """Return the layers that must run together with this one."""

    def attention(self, work: ConversionContext, layer: int) -> nn.Module:
        """Return the simulated attention of a layer."""

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Run hidden states [N, T, D], in place, through layers that must run together."""
