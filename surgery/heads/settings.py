"""What a user can ask of the scoring of heads, with the defaults in one place."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings
from surgery.heads.methods import SCORERS

SUFFIX = ".safetensors"
"""Of pattern files."""

TRAINED = ("duo", "prulong")
"""Methods that find their scores by gradient descent."""


@dataclass(frozen=True)
class HeadSettings(FileSettings):
    """Settings of ``surgery heads``; configs/heads.yaml holds the same with comments.

    Attributes:
        method: how heads are scored, one of SCORERS.
        sinks, recent: tokens that a streaming head sees: the first, and the last with the query's own among them.
        target: share of the heads that are to stay full; what trained gates are driven to.
        text: builtin, a file or a dataset's name: natural text, and what the needles stand in.
        text_field: column that holds the text.
        recall: share of the natural text's sequences, 0 to 1, that carry planted facts with questions.
        length: tokens of a sequence; None for the model's limit, or 4,096 if that is less.
        samples: sequences, of methods that train none (each its own default if None).
        facts: planted in a sequence with needles.
        steps: of training, for methods that train gates; every step is one sequence a process.
        learning_rate: of the gates; each method's own if None.
        penalty: weight of the mean gate at first (duo); training moves it until the target is met.
        seeds: how often to score, each time on other data; the scores are the mean, and their spread is kept.
        seed: the first of them.
        offload: keep the model's layers in CPU memory and bring each to the device when it runs.
        device: "auto" is a CUDA device if there is one, otherwise the CPU.
        dtype: what the model runs in; "auto" is bfloat16 on an accelerator and float32 on a CPU. Gates and scores are
            float32 always.
    """

    method: str = "duo"
    sinks: int = 64
    recent: int = 256
    target: float = 0.25
    text: str = "builtin"
    text_field: str = "text"
    recall: float = 0.0
    length: int | None = None
    samples: int | None = None
    facts: int = 10
    steps: int = 150
    learning_rate: float | None = None
    penalty: float = 0.05
    seeds: int = 1
    seed: int = 0
    offload: bool = False
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in SCORERS:
            raise SurgeryError(f"method {self.method!r} is unknown: choose {', '.join(SCORERS)}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16", "float64"):
            raise SurgeryError(f"dtype {self.dtype!r} is unknown: choose auto, float32, bfloat16, float16 or float64")
        if self.sinks < 0 or self.recent < 1:
            raise SurgeryError(f"{self.sinks} sinks and {self.recent} recent tokens: at least 0 and 1 are needed")
        if not 0 <= self.target <= 1:
            raise SurgeryError(f"target {self.target}: a share of heads lies between 0 and 1")
        if not 0 <= self.recall <= 1:
            raise SurgeryError(f"recall {self.recall}: a share of sequences lies between 0 and 1")
        for name in ("length", "samples", "facts", "steps", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SurgeryError(f"{name} must be at least 1, not {value}")
        if self.penalty <= 0 or (self.learning_rate is not None and self.learning_rate <= 0):
            raise SurgeryError("learning_rate and penalty must be above 0")
