"""Several processes give what one gives."""

import json
import sys
from pathlib import Path

import pytest
from processes import torchrun
from sessions import Bars

from surgery.common.errors import SurgeryError
from surgery.running.processes import Processes

PROMPTS = [[1, 40, 7, 300], [1], [9, 9, 12], list(range(5, 30)), [1, 2, 77], [1, 55, 56, 57, 58, 3000], [800, 4000]]


def measure(checkpoint: Path) -> dict:
    """Measure on every process of a launch; all but `own` and the rank should be independent of their number."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from surgery.eval.generation import complete
    from surgery.eval.session import Session

    torch.set_num_threads(1)
    processes = Processes(cpu=True)
    own: list[int] = []
    requests: list[int] = []
    advanced: list[int] = []

    def square(item: int) -> int:
        own.append(item)
        return item * item

    def refuse(item: int) -> int:
        if item == 1:
            raise SurgeryError("item 1 is refused")
        return item

    def refusal(call) -> str:
        try:
            call()
        except SurgeryError as error:
            return str(error)
        return "none"

    squares = processes.map(square, range(5), lambda: advanced.append(1))
    fewer = processes.map(lambda item: item, [7])
    nothing = processes.map(square, [])
    answer = processes.from_main(lambda: requests.append(1) or {"rank": processes.rank, "value": 0.1})
    refusals = [
        refusal(lambda: processes.map(refuse, range(3))),
        refusal(lambda: processes.from_main(lambda: refuse(1))),
    ]
    processes.wait()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    session = Session(tokenizer, processes, Bars(), batch_size=2)
    completions = complete(model, session, PROMPTS, 6, "write")
    same = [squares, fewer, nothing, answer, refusals, completions]
    result = {"same": same, "rank": processes.rank, "count": processes.count, "own": own}
    return result | {"asked": len(requests), "advanced": len(advanced), "prompts": session.progress.done}


def test_one_process(checkpoints):
    result = measure(checkpoints("llama"))
    squares, fewer, nothing, answer, refusals, completions = result["same"]
    assert (squares, fewer, nothing) == ([0, 1, 4, 9, 16], [7], [])
    assert answer == {"rank": 0, "value": 0.1}
    assert refusals == ["item 1 is refused"] * 2
    assert len(completions) == len(PROMPTS) and len({tuple(completion) for completion in completions}) > 3
    assert (result["rank"], result["count"], result["own"]) == (0, 1, [0, 1, 2, 3, 4])
    assert (result["asked"], result["advanced"], result["prompts"]) == (1, 5, 7)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(checkpoints, tmp_path):
    one = measure(checkpoints("llama"))
    result = torchrun(__file__, checkpoints("llama"), tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    main, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert main["same"] == other["same"] == one["same"]
    assert [(each["rank"], each["count"]) for each in (main, other)] == [(0, 2), (1, 2)]
    assert (main["own"], other["own"]) == ([0, 2, 4], [1, 3])
    assert (main["asked"], other["asked"]) == (1, 0)
    assert (main["advanced"], main["prompts"]) == (5, 7)


if __name__ == "__main__":
    checkpoint, results = map(Path, sys.argv[1:])
    result = measure(checkpoint)
    (results / f"rank-{result['rank']}.json").write_text(json.dumps(result))
