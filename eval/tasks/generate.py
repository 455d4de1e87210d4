"""Generation task: greedy completions of the same prompts by every model, for manual comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel

from surgery.eval.generation import complete
from surgery.eval.sequences import tokenize
from surgery.eval.session import Session

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class GenerateTask:
    """Greedy completions without a score, for manual comparison.

    Attributes:
        prompts: texts to complete. The tokenizer's bos token is prepended if it has one.
        new_tokens: maximum number of new tokens per prompt.
    """

    prompts: tuple[str, ...]
    new_tokens: int
    name: ClassVar[str] = "generate"
    native: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        return {"prompts": list(self.prompts), "new_tokens": self.new_tokens}

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        """Return `completions`: prompt and completion of each of the first `session.limit` prompts.

        Raises SurgeryError: a prompt has no tokens.
        """
        tokenizer = session.tokenizer
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        prompts = self.prompts[: session.limit]
        ids = [bos + tokenize(tokenizer, prompt) for prompt in prompts]
        texts = [
            tokenizer.decode(completion, skip_special_tokens=True)
            for completion in complete(model, session, ids, self.new_tokens, self.name)
        ]
        return {
            "completions": [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)],
            "new_tokens": self.new_tokens,
        }


def build(data: TaskData) -> GenerateTask:
    """Build the task from the settings and texts of an evaluation."""
    return GenerateTask(data.settings.prompts or data.openings(), data.settings.new_tokens)
