"""The kernels task: whether a model says the same with the project's kernels under its attentions.

It checks this machine's kernels more than the checkpoint. Without a GPU they run in Triton's interpreter where
TRITON_INTERPRET=1 is set before the start, and not at all otherwise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from surgery.acceleration import accelerate, decelerate
from surgery.eval.held_out_text import HeldOutText
from surgery.eval.logits import LogitReader, evaluation_mode
from surgery.eval.session import Session, device_of
from surgery.eval.token_losses import losses_through_cache
from surgery.evaluation.task_data import TaskData
from surgery.kernels.backend import interpreted

WINDOWS = 2
"""Held-out windows, the first ones: the interpreter takes seconds for a step."""
PHASES = ("kernels", "kernels: own code")


@dataclass(frozen=True)
class KernelsTask:
    """Decodes held-out text through the live cache twice, by the model's own code and by the kernels.

    Attributes:
        text: the windows; the first `WINDOWS` count.
        decoded: how many of the last tokens of each are decoded one by one.
    """

    text: HeldOutText
    decoded: int
    name: ClassVar[str] = "kernels"
    native: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        text = self.text.first(WINDOWS)
        return {
            "windows": len(text.tokens),
            "length": text.tokens.shape[1],
            "decoded": self.decoded,
            "data_sha256": text.sha256,
        }

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        """Measures on the main process, as the others have the same model.

        Returns:
            {"operations": {name, or why a layer keeps its own code: layers}, "refused": why no layer has kernels, or
            None, "logit_error": relative root mean square of `acceleration.comparison`, "decoded_loss" and
            "decoded_loss_own_code": nats a token, "largest_difference": of a token's loss, "interpreted", "device"};
            the numbers are None where kernels are refused.
        """
        return session.processes.from_main(lambda: self._measure(model, session))

    @torch.no_grad()
    def _measure(self, model: PreTrainedModel, session: Session) -> dict[str, Any]:
        done = accelerate(model)
        found = {
            "operations": dict(Counter(done.layers)),
            "refused": done.refused,
            "logit_error": done.error,
            "decoded_loss": None,
            "decoded_loss_own_code": None,
            "largest_difference": None,
            "interpreted": interpreted(),
            "device": device_of(model).type,
        }
        if done.refused is not None:
            return found
        try:
            fast = self._losses(model, session, PHASES[0])
        finally:
            decelerate(model)
        plain = self._losses(model, session, PHASES[1])
        return found | {
            "decoded_loss": float(fast.mean()),
            "decoded_loss_own_code": float(plain.mean()),
            "largest_difference": float((fast - plain).abs().max()),
        }

    def _losses(self, model: PreTrainedModel, session: Session, phase: str) -> torch.Tensor:
        """Losses of the decoded tokens [N, decoded], fp64."""
        tokens = self.text.first(WINDOWS).tokens
        found = []
        with evaluation_mode(model), session.progress.phase(phase, len(tokens), "window") as done:
            reader = LogitReader(model, tokens)
            for window in tokens.split(1):
                found.append(losses_through_cache(reader, window, self.decoded)[:, -self.decoded :].double())
                done()
        return torch.cat(found)


def build(data: TaskData) -> KernelsTask:
    """From the settings and texts of an evaluation."""
    return KernelsTask(data.text, data.settings.decoded)
