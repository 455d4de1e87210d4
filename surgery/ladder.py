"""The exactness ladder: every stage of a conversion carried through the model side by side on held-out text.

source → merged → rotated are exact, partial RoPE and truncation each lose something, a least-squares fit wins some of
it back; what is written and loaded again must equal the last. One loss per stage says where a conversion's loss comes
from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surgery.anatomy import AttentionAnatomy
from surgery.attention import CapturedAttention
from surgery.held_out import HeldOut, Score
from surgery.layer_stream import LayerStream, StreamedLayer
from surgery.transforms.key_basis import KeyBasis, identity_basis
from surgery.transforms.latent_layer import LatentLayer, SimulatedAttention
from surgery.transforms.partial_rope import latent_form

EXACT_STAGES = ("merged", "rotated")
# Sequences on which a layer's own output error is measured; it settles long before the loss does.
ERROR_SEQUENCES = 2


class Ladder:
    """Hidden states of every stage, advanced layer by layer.

    Args:
        stream: the source model.
        held_out: text and recall prompts.
        batch_size: sequences at a time.
        stages: the lossy stages that :meth:`advance` will be given.
    """

    def __init__(self, stream: LayerStream, held_out: HeldOut, batch_size: int, stages: tuple[str, ...]):
        self._stream, self._held_out, self._batch_size = stream, held_out, batch_size
        embedded = stream.embed(held_out.tokens)
        self.hidden: dict[str, Tensor] = {stage: embedded.clone() for stage in ("source", *EXACT_STAGES, *stages)}

    def advance(
        self, layer: StreamedLayer, anatomy: AttentionAnatomy, basis: KeyBasis, lossy: dict[str, LatentLayer]
    ) -> dict[str, float]:
        """Runs one layer in every stage.

        Args:
            anatomy: the source's attention in float64.
            basis: the key basis of the conversion.
            lossy: the layer in each lossy stage.

        Returns:
            The layer's own relative output error in each lossy stage, ``‖converted - source‖ / ‖source‖`` on the
            source's inputs.
        """
        every_component = torch.arange(basis.components)
        identity = identity_basis(anatomy.kv_heads, anatomy.head_dim // 2)
        # Built one at a time: the exact forms are as wide as the source's whole cache.
        forms: dict[str, Callable[[], LatentLayer]] = {
            "merged": lambda: latent_form(anatomy, identity, every_component),
            "rotated": lambda: latent_form(anatomy, basis, every_component),
            **{name: lambda form=form: form for name, form in lossy.items()},
        }
        captured = self._source_output(layer, anatomy)
        errors = {}
        for name, form in forms.items():
            simulated = form().to(self._stream.device, self._stream.dtype)
            if name in lossy:
                errors[name] = _relative_error(simulated, captured)
            self._stream.run_layer(layer, self.hidden[name], self._batch_size, SimulatedAttention(simulated))
        self._stream.run_layer(layer, self.hidden["source"], self._batch_size)
        return errors

    def scores(self) -> dict[str, Score]:
        """Loss and recall of every stage, once all layers have passed."""
        return {stage: self._held_out.score(self._stream, hidden) for stage, hidden in self.hidden.items()}

    @torch.no_grad()
    def _source_output(self, layer: StreamedLayer, anatomy: AttentionAnatomy) -> CapturedAttention:
        captured = CapturedAttention(anatomy.to(self._stream.device, self._stream.dtype))
        layer(self.hidden["source"][:ERROR_SEQUENCES].to(self._stream.device, self._stream.dtype), captured)
        return captured


@torch.no_grad()
def _relative_error(form: LatentLayer, source: CapturedAttention) -> float:
    return float((form.forward(source.inputs) - source.outputs).norm() / source.outputs.norm())
