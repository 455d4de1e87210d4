"""The exactness ladder: every stage of a conversion carried through the model side by side on held-out text.

source → merged → rotated are exact, partial RoPE and truncation each lose something, a least-squares fit wins some of
it back; what is written and loaded again must equal the last. One loss per stage says where a conversion's loss comes
from.
"""

from __future__ import annotations

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
        self.hidden: dict[str, Tensor] = {
            stage: embedded.clone() for stage in ("source", *EXACT_STAGES, *stages)
        }

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
        device, dtype = self._stream.device, self._stream.dtype
        stages = {
            "merged": latent_form(anatomy, identity_basis(anatomy.kv_heads, anatomy.head_dim // 2), _all(anatomy)),
            "rotated": latent_form(anatomy, basis, _all(anatomy)),
            **lossy,
        }
        stages = {name: form.to(device, dtype) for name, form in stages.items()}
        errors = self._own_errors(layer, anatomy.to(device, dtype), {name: stages[name] for name in lossy})
        self._stream.run_layer(layer, self.hidden["source"], self._batch_size)
        for name, form in stages.items():
            self._stream.run_layer(layer, self.hidden[name], self._batch_size, SimulatedAttention(form))
        return errors

    def scores(self) -> dict[str, Score]:
        """Loss and recall of every stage, once all layers have passed."""
        return {stage: self._held_out.score(self._stream, hidden) for stage, hidden in self.hidden.items()}

    @torch.no_grad()
    def _own_errors(
        self, layer: StreamedLayer, anatomy: AttentionAnatomy, stages: dict[str, LatentLayer]
    ) -> dict[str, float]:
        captured = CapturedAttention(anatomy)
        layer(self.hidden["source"][:ERROR_SEQUENCES].to(self._stream.device, self._stream.dtype), captured)
        want = captured.outputs
        return {
            name: float((form.forward(captured.inputs) - want).norm() / want.norm()) for name, form in stages.items()
        }


def _all(anatomy: AttentionAnatomy) -> Tensor:
    return torch.arange(anatomy.kv_heads * anatomy.head_dim // 2)
