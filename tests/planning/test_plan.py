"""`surgery plan`: what it simulates is what a conversion writes, bytes are the live cache's, budgets are kept."""

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from command_line import run_main
from conversions import convert_checkpoint
from decoded_losses import decoded
from tiny_models import HELD_OUT, make_checkpoint
from transformers import AutoModelForCausalLM

from surgery.calibration.held_out import HeldOut
from surgery.calibration.sequences import token_hash
from surgery.calibration.texts import load_texts
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.kv_cache import cache_bytes
from surgery.heads.pattern import HeadPattern
from surgery.planning.candidates import Candidates
from surgery.planning.measure import Carried, Increase, Scored, measure
from surgery.planning.plan import make_plan, open_work
from surgery.planning.plan_file import read_plan, write_plan
from surgery.planning.rounds import Rounds
from surgery.planning.rows import alike, choose, clearly_worse, contenders
from surgery.planning.settings import PlanSettings, parse_tokens
from surgery.planning.sizes import around_best, search_by_loss
from surgery.running.source import Source
from surgery.structures import packed_rows
from surgery.structures.registry import find_target

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 4, "recall": 0.0}
CONTEXT = {"context": "64", "batch": 2}
CASES = {
    "mla": {"kv_lora_rank": 20, "rope_dim": 4},
    "mla, ranks by layer": {"carrier": "own", "kv_ratio": 0.5, "rope_dim": 4},
    "gqa": {"kv_heads": 1},
    "lowrank": {"kv_ratio": 0.5},
    "hybrid": {"heads": "a pattern", "streaming": 0.5},
    "lowrank, bits": {"kv_ratio": 0.1, "bits": "auto"},
    "mla, bits": {"kv_ratio": 0.2, "bits": "auto"},
    "crosslayer": {"kv_ratio": 0.1},
}


@pytest.fixture(scope="module")
def plan(checkpoints):
    return make_plan(checkpoints("llama"), PlanSettings(kv_ratio=0.4, **TEXT, **CONTEXT), called="ckpt")


@pytest.fixture(scope="module")
def at_work(checkpoints):
    """Gives settings, source, texts and statistics of a family's plan, which its candidates share."""
    with ExitStack() as works:

        @cache
        def get(family):
            settings = PlanSettings(**{**TEXT, "held_out": CONTEXT["batch"]}, **CONTEXT)
            opened, quiet = Source.open(checkpoints(family), settings), Progress(silent=True)
            texts = load_texts(opened, settings, quiet)
            return settings, opened, texts, works.enter_context(open_work(opened, settings, texts, quiet))

        yield get


SELDOM = "mla, ranks by layer", "hybrid"
"""Cases that differ less from the others."""


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *(pytest.param("llama_bias", case, marks=pytest.mark.slow if case in SELDOM else ()) for case in CASES),
        pytest.param("qwen3", "mla", marks=pytest.mark.slow),
    ],
)
def test_candidates_lose_what_the_written_model_does(checkpoints, at_work, tmp_path, monkeypatch, family, case):
    """Loss through a cache. A plan spends bits by predicted losses; so does a conversion that measures no layers."""
    monkeypatch.setattr(packed_rows, "ROUNDS", 0)
    target, request = find_target(case.partition(",")[0]), dict(CASES[case])
    if "heads" in request:
        request["heads"] = str(tmp_path / "pattern.safetensors")
        HeadPattern(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), "needle", 3, 20).save(Path(request["heads"]))
    settings, opened, texts, work = at_work(family)
    candidates = Candidates(opened, work, settings)
    sized = candidates.sized(target, request, None)
    assert sized is not None, candidates.refused
    (scored,) = measure([sized], work, texts.held_out).scored
    settings = target.settings({**settings.common(), **request})
    conversion = convert_checkpoint(checkpoints(family), tmp_path / "out", settings)
    model = AutoModelForCausalLM.from_pretrained(conversion.path).eval()
    tokens = texts.held_out.tokens[: texts.held_out.texts]
    losses, cache = decoded(model, tokens)
    assert scored.losses == pytest.approx(losses.tolist(), abs=2e-5)
    assert sized.kv_bytes == cache_bytes(cache)


def test_losses_are_of_text_alone_whatever_is_planted_in_calibration_text(checkpoints):
    quiet, texts = Progress(silent=True), {}
    for recall in (0.0, 1.0):
        settings = PlanSettings(**{**TEXT, "calibration_length": 128, "recall": recall})
        opened = Source.open(checkpoints("llama"), settings)
        texts[recall] = load_texts(opened, settings, quiet, planted=False)
    conversion = load_texts(opened, settings, quiet)  # with facts in its held-out text
    alone, other = (each.held_out.tokens[: each.held_out.texts] for each in texts.values())
    assert torch.equal(alone, other) and not torch.equal(alone, conversion.held_out.tokens[: len(alone)])
    assert torch.equal(texts[1.0].calibration, conversion.calibration)
    assert texts[1.0].description["held_out_sha256"] == texts[0.0].description["held_out_sha256"]


def test_held_out_text_is_short_but_where_heads_stream(checkpoints):
    longer = {**TEXT, "calibration_length": 1024, "calibration_tokens": 2048}
    assert PlanSettings(**longer).text_length == 512 and PlanSettings(**longer, heads="pattern").text_length == 1024
    settings = PlanSettings(**{**TEXT, "calibration_length": 128}, held_out_length=96)
    opened, quiet = Source.open(checkpoints("llama"), settings), Progress(silent=True)
    whole = load_texts(opened, settings, quiet, planted=False)
    short = load_texts(opened, settings, quiet, planted=False, held_out_length=settings.text_length)
    count = whole.held_out.texts
    assert torch.equal(short.held_out.tokens[:count], whole.held_out.tokens[:count, :96])
    assert short.held_out.answers.any(1).all()  # prompts are made at that length, not cut
    assert torch.equal(short.calibration, whole.calibration) and short.counts() == whole.counts()
    assert short.description["held_out_length"] == 96
    assert short.description["held_out_sha256"] == token_hash(short.held_out.tokens[:count])


def test_intervals_are_students_and_scores_of_more_text_means():
    result = Increase.of([-0.1, 0.0, 0.1])
    assert result.mean == pytest.approx(0, abs=1e-12)
    assert result.high == -result.low == pytest.approx(1.8856 * 0.1 / 3**0.5, rel=1e-4)
    alike = Increase.of([0.2, 0.2])
    assert (alike.low, alike.high) == pytest.approx((0.15, 0.25))
    assert Increase.of([0.1]) == Increase(0.1, None, None)
    more = Scored([1.0], 0.5, 1.0, 0.1).merge_with(Scored([2.0, 3.0], 2.0, 0.25, 0.4))
    assert more == Scored([1.0, 2.0, 3.0], pytest.approx(1.5), pytest.approx(0.5), pytest.approx(0.3))
    assert Scored([1.0], None, None).merge_with(Scored([2.0], None, None)) == Scored([1.0, 2.0], None, None)


def test_rows_are_told_by_bytes_and_the_choice_costs_least_within_them(plan):
    sizes = [row.kv_bytes for row in plan.rows]
    assert sizes == sorted(sizes) and len({row.command for row in plan.rows}) == len(sizes)
    fitting, level = [row for row in plan.rows if row.kv_ratio <= 0.4], alike(plan.rows, 0.4)
    assert plan.chosen in fitting and plan.alike == len(level)
    assert min(fitting, key=lambda row: row.cost) in [plan.rows[index] for index in level]
    assert plan.chosen.drift == min(plan.rows[index].drift for index in level)
    for index, row in enumerate(plan.rows):
        assert row.best == all(row.cost < other.cost for other in plan.rows[:index])
        assert (row.low is None) == (len(row.by_text) == 1)
        assert row.low is None or row.low <= row.loss_increase <= row.high
    assert {row.to for row in plan.rows} == {"mla", "gqa", "lowrank", "crosslayer", "quantized"}
    assert all(row.command.startswith(f"surgery convert ckpt --to {row.to}") for row in plan.rows)


def test_memory_is_a_share_of_what_all_sequences_hold(checkpoints, plan):
    source = checkpoints("llama")
    settings = {"allow": ("lowrank",), **TEXT, **CONTEXT}
    values = AutoModelForCausalLM.from_pretrained(source)(torch.zeros(2, 64, dtype=torch.long)).past_key_values
    assert plan.source["kv_bytes"] == cache_bytes(values)
    by_memory = make_plan(source, PlanSettings(memory=f"{0.4 * cache_bytes(values) / 1024:.6f}KiB", **settings))
    assert by_memory.budget["kv_ratio"] == pytest.approx(0.4, abs=1e-4)
    assert by_memory.chosen.kv_bytes <= 0.4 * cache_bytes(values)
    with pytest.raises(SurgeryError, match="nothing to convert"):
        make_plan(source, PlanSettings(memory="1GiB", **settings))


def test_a_loss_is_met_by_the_fewest_bytes(checkpoints):
    settings = {"allow": ("lowrank", "gqa", "quantized"), **TEXT, **CONTEXT}
    result = make_plan(checkpoints("llama"), PlanSettings(max_loss=9.0, **settings))
    assert result.choice == 0 and {row.to for row in result.rows} == {"lowrank", "gqa", "quantized"}
    # Of sizes that nobody asked for; two bytes of each head's keys and values are more than the least share here.
    assert set(result.refused) <= {"--to quantized"}
    assert not any("bits" in row.asked for row in result.rows)


@pytest.mark.parametrize(("least", "looked_at"), [(0.0, [1 / 32, 1 / 64, 0.02108]), (1 / 32, [1 / 32])])
def test_a_loss_is_looked_for_below_the_sizes_that_every_plan_weighs(least, looked_at):
    """Losses of 0.001 over the square of the share, and 2.5 allowed: nine tenths of that at a share of 0.02108."""
    target, scores, request = SimpleNamespace(name="lowrank"), [], []

    def sized(target, message, share, **kwargs):
        of = {"target": target, "asked": {**message, "kv_ratio": share}, "kv_bytes": share, "name": share}
        return SimpleNamespace(**of) if share >= least else None

    def add(more):
        request.extend(each.kv_bytes for each in more)
        attempts.extend(more)
        scores.extend((Scored([1 + 0.001 / each.kv_bytes**2], None, None), Scored([1.0], None, None)) for each in more)

    attempts = []
    add([sized(target, {"bits": "auto"}, share) for share in (0.125, 0.0625)])
    search_by_loss(attempts, scores, SimpleNamespace(source_bytes=1.0, sized=sized, refused={}), 2.5, add)
    assert request[2:] == pytest.approx(looked_at, abs=1e-5)


def row_of(plan, by_text, divergence, *, kv_ratio=0.3, answers=0.0):
    loss, increase = sum(by_text) / len(by_text), Increase.of(by_text)
    measures = {"by_text": by_text, "loss_increase": loss, "low": increase.low, "high": increase.high}
    measures |= {"divergence": divergence, "cost": loss + answers}
    return replace(plan.rows[0], kv_ratio=kv_ratio, kv_bytes=kv_ratio, **measures)


def test_of_what_texts_cannot_tell_apart_the_one_that_moved_least_is_chosen(plan):
    lucky = row_of(plan, [-0.03, 0.01, -0.02, 0.02], 0.004)
    near = row_of(plan, [0.001, 0.0, 0.001, 0.0], 0.0001)
    far = row_of(plan, [0.05, 0.06, 0.04, 0.05], 0.00001)
    forgets = row_of(plan, [0.0, 0.001, 0.0, 0.001], 0.00005, answers=0.0002)
    large = row_of(plan, [0.0, 0.0, 0.0, 0.0], 0.0, kv_ratio=0.6)
    rows = [lucky, near, far, forgets, large]
    assert lucky.cost == min(row.cost for row in rows)
    assert alike(rows, 0.5) == [1, 3, 0]
    assert choose(rows, 0.5, None) == 1 and choose(rows, 1.0, None) == 4
    # A lead that all texts agree on is one, however little another moved.
    ahead = row_of(plan, [-0.011, -0.009, -0.01, -0.01], 0.004)
    assert choose([ahead, near], 0.5, None) == 0
    # A row of more texts is compared on those that both saw; of one text the least cost is all there is.
    assert alike([replace(near, by_text=[*near.by_text, 9.0]), lucky], 0.5) == [0, 1]
    assert choose([row_of(plan, [0.1], 0.0), row_of(plan, [0.09], 0.1)], 0.5, None) == 1


def test_what_moves_much_and_costs_more_than_something_no_larger_is_clearly_worse(plan):
    least, limit = (row_of(plan, [0.001, 0.002], 0.001), row_of(plan, [0.01, 0.02], 0.005))
    assert clearly_worse([least, limit]) == {1} and clearly_worse([least, replace(limit, divergence=0.004)]) == set()
    larger = replace(least, kv_bytes=2 * limit.kv_bytes, kv_ratio=0.4)
    assert clearly_worse([larger, limit]) == set() and clearly_worse([larger, limit], 0.4) == {
        1
    }  # both keep to the budget
    assert clearly_worse([larger, limit], 0.3) == set()
    assert clearly_worse([replace(least, cost=0.1), replace(limit, cost=0.09)]) == set()  # it costs more
    assert clearly_worse([least, replace(limit, cost=limit.cost + 0.05, divergence=0.001)]) == {1}  # by its answers


def test_more_text_is_for_what_it_may_decide(plan):
    sizes = {0.2: [0.05, 0.051], 0.3: [0.015, 0.035], 0.4: [0.005, 0.02], 0.5: [0.001, 0.001], 0.6: [0.01, 0.025]}
    rows = [row_of(plan, by_text, 0.0, kv_ratio=ratio) for ratio, by_text in sizes.items()]
    assert contenders(rows, None, 0.02) == [
        1,
        2,
    ]  # one is too far off, and of one that surely meets it the rest is larger
    assert contenders(rows, 0.1, None) == [] and contenders(rows, 0.2, None) == []  # nothing fits, or one row alone
    assert contenders(rows[2:3], None, 0.02) == [0]  # which may meet the loss or not
    assert len(contenders([rows[0]] * 9, 0.5, None)) == 6


def test_text_is_spent_where_it_decides(plan):
    """Candidates are their losses on eight texts, a source that loses 1 on all, and how far they move predictions."""
    sure, close, other = ([1 + each] * 8 for each in (0.0, 0.001, 0.02))
    close[1] = 0.99
    attempts = [(sure, 1e-5), (close, 2e-5), ([2.0] * 8, 0.7), (other, 3e-5)]
    held_out, request = HeldOut.of_text(torch.arange(8)[:, None]), []

    def measure(some, part):
        texts = part.tokens[:, 0].tolist()
        request.append(([attempts.index(each) for each in some], texts))
        scored = [Scored([losses[text] for text in texts], None, None, moved) for losses, moved in some]
        return Carried(Scored([1.0] * len(texts), None, None), scored)

    def told(some, scores):
        differences = ([a - b for a, b in zip(own.losses, its.losses, strict=True)] for own, its in scores)
        return [row_of(plan, by_text, moved) for by_text, (_, moved) in zip(differences, some, strict=True)]

    rounds = Rounds(held_out, measure, told, 0.5, {})
    rounds.add(attempts)
    rounds.decide(None)
    assert request == [([0, 1, 2, 3], [0, 1]), ([0, 1, 3], [2, 3]), ([0, 1], [4, 5, 6, 7])]
    assert [len(row.by_text) for row in rounds.rows()] == [8, 8, 2, 4] and choose(rounds.rows(), 0.5, None) == 0
    attempts.append((sure, 0.0))
    rounds.add(attempts[-1:])
    assert [texts for _, texts in request[3:]] == [[0, 1], [2, 3]]
    for share, due in ((0.5, [[0, 1], [2, 3]]), (0.2, [[0, 1]])):  # rows have 0.3 of the bytes
        del request[:]
        some = Rounds(held_out, measure, told, share, {})
        some.add(attempts[:1], twice=False)
        assert [texts for _, texts in request] == due


@pytest.mark.parametrize("budget", [{"kv_ratio": 0.5}, {"max_loss": 10.0}], ids=str)
def test_a_candidate_whose_loss_is_not_finite_has_failed(checkpoints, monkeypatch, budget):
    def broken(some, work, part):
        carried = measure(some, work, part)
        for each, score in zip(some, carried.scored, strict=True):
            if each.to == "lowrank":
                score.losses[0] = math.nan
        return carried

    monkeypatch.setattr("surgery.planning.plan.measure", broken)
    source, settings = checkpoints("llama"), {**budget, **TEXT, **CONTEXT}
    result = make_plan(source, PlanSettings(allow=("lowrank", "gqa"), **settings))
    assert {row.to for row in result.rows} == {"gqa"} and all(
        name.startswith("--to lowrank") for name in result.refused
    )
    with pytest.raises(SurgeryError):
        make_plan(source, PlanSettings(allow=("lowrank",), **settings))


def test_sizes_around_a_budget_are_of_what_is_not_clearly_worse_there(plan):
    def sized(target, message, share, **kwargs):
        settings = {**message, "kv_ratio": share}
        return SimpleNamespace(target=target, asked=settings, config=(target, share), name="") if share != 0.5 else None

    plain = SimpleNamespace(asked={}, config="plain")
    attempts = [sized("good", {"bits": "auto"}, 0.25), sized("far", {}, 0.25), plain]
    rows = [
        replace(row_of(plan, [cost, cost], cost, kv_ratio=size / 16), kv_bytes=size)
        for size, cost in [(4, 1.0), (3, 9.0), (5, 2.0)]  # the second is smaller, but the first keeps to the budget too
    ]
    candidates = SimpleNamespace(sized=sized, refused={})
    result = around_best(SimpleNamespace(weighed=attempts, rows=lambda: rows), candidates, 0.25)
    assert [(each.target, each.asked) for each in result] == [("good", {"bits": "auto", "kv_ratio": 0.125})]


def test_divergence_is_half_the_mean_square_of_what_tokens_lose(at_work):
    settings, opened, texts, work = at_work("llama")
    sized = Candidates(opened, work, settings).sized(find_target("lowrank"), {"kv_ratio": 0.3}, None)
    result = measure([sized], work, texts.held_out)
    hidden, stream = opened.stream.embed(texts.held_out.tokens), opened.stream
    own = hidden.clone()
    for index in range(opened.layers):
        with stream.layer(index) as layer:
            hidden = stream.run_layer(layer, hidden, 4)
            own = stream.run_layer(layer, own, 4, sized.structure.closed_form(work, index))
    count = texts.held_out.texts
    own, source = (stream.token_losses(each[:count], texts.held_out.tokens[:count]) for each in (own, hidden))
    assert result.source.divergence == 0
    assert (
        result.scored[0].divergence == pytest.approx(float((own - source).square().mean()) / 2)
        and result.scored[0].divergence > 0
    )


def test_what_cannot_be_met_says_what_comes_nearest_and_its_price(plan):
    rows = [
        replace(plan.rows[0], kv_ratio=0.2, loss_increase=0.5),
        replace(plan.rows[0], kv_ratio=0.4, loss_increase=0.1),
    ]
    assert choose(rows, None, 0.2) == 1 and choose(rows, None, 0.6) == 0 and choose(rows, 0.3, None) == 0
    with pytest.raises(
        SurgeryError, match=r"loss by at most 0.05 nats .* the smallest increase is \+0.1000 .* at 40.0% of the KV"
    ):
        choose(rows, None, 0.05)
    with pytest.raises(SurgeryError, match=r"fits into 10.0% of the KV bytes; the smallest takes 20.0%, for \+0.5000"):
        choose(rows, 0.1, None)


def test_a_budget_that_nothing_meets_is_told_with_the_smallest_that_there_is(checkpoints):
    settings = PlanSettings(kv_ratio=0.001, allow=("lowrank", "quantized", "bits"), **TEXT, **CONTEXT)
    with pytest.raises(
        SurgeryError, match=r"fits into 0.1% of the KV bytes; the smallest takes \d+\.\d%, for [+-]"
    ) as message:
        make_plan(checkpoints("llama"), settings)
    assert "--to lowrank --kv-ratio 0.0" in str(message.value) and "\n" not in str(message.value)


def test_an_engine_gets_what_it_and_our_plugin_load(checkpoints):
    result = make_plan(checkpoints("llama"), PlanSettings(kv_ratio=0.5, engine="llama.cpp", **TEXT, **CONTEXT))
    assert {row.to for row in result.rows} <= {"mla", "gqa"} and not any("bits" in row.asked for row in result.rows)
    assert all(row.engines["llama.cpp"]["status"] != "refused" for row in result.rows)
    assert "llama.cpp" in result.refused["--to lowrank"]
    result = make_plan(
        checkpoints("llama"), PlanSettings(kv_ratio=0.5, engine="vllm", allow=("mla", "bits"), **TEXT, **CONTEXT)
    )
    assert any(row.asked.get("bits") == "auto" for row in result.rows)
    assert all("engine" not in row.asked for row in result.rows if row.asked.get("bits"))


def test_stock_mla_is_weighed_where_that_class_can_hold_it(checkpoints, plan):
    """It has no norm of queries and keys."""
    settings = {"allow": ("mla",), **TEXT, **CONTEXT}
    own = make_plan(checkpoints("qwen3"), PlanSettings(kv_ratio=0.4, **settings))
    stock = [row for row in plan.rows if row.to == "mla" and 0.3 < row.kv_ratio < 0.4]
    assert {row.asked.get("carrier") or row.asked["bits"] for row in stock} == {"stock", "own", "auto"}
    assert own.rows and all(row.asked.get("carrier") != "stock" for row in own.rows)


def test_windows_count_in_bytes_and_what_takes_none_is_refused(checkpoints):
    settings = {**TEXT, "context": "1k", "batch": 2}
    result = make_plan(checkpoints("qwen2_window"), PlanSettings(kv_ratio=0.6, **settings))
    # One layer of 1,024 tokens and one of its window of 16, less the query's own: 2 heads, 2 * 8 numbers of 4 bytes.
    assert result.source["kv_bytes"] == 2 * (1024 + 15) * 2 * 2 * 8 * 4
    (merged,) = [row for row in result.rows if row.to == "gqa"]
    assert merged.kv_ratio == 0.5
    in_bits = [row for row in result.rows if "bits" in row.asked or row.to == "quantized"]
    assert {row.to for row in in_bits} == {"mla", "lowrank", "quantized"}
    assert all(row.kv_ratio * (1024 + 15) > 15 for row in in_bits)  # the window is kept whole
    assert "sliding windows" in result.refused.pop("--to mla --carrier stock")
    reasons = "full attention", "no head pattern", "no converted layers are adjacent"
    assert all(any(reason in why for reason in reasons) for why in result.refused.values())


def test_the_file_of_a_plan_is_what_convert_carries_out(plan, tmp_path, checkpoints, monkeypatch, capsys):
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    planned = read_plan(path)
    assert planned.target.name == plan.chosen.to and planned.settings.items() >= plan.chosen.asked.items()
    arguments = ["convert", checkpoints("llama"), "--plan", path, "--out", tmp_path / "out", "--json"]
    code, out, error = run_main(monkeypatch, capsys, *arguments)
    assert code == 0, error
    report = json.loads(out)
    assert report["target"]["to"] == plan.chosen.to
    assert report["target"]["predicted"]["loss_increase"] == plan.chosen.loss_increase
    assert {name: report["settings"][name] for name in ("calibration_tokens", "recall")} == {
        "calibration_tokens": 256,
        "recall": 0.0,
    }
    for content in ("to: mla\n", "to: mla\nsettings: 3\npredicted: {}\n"):
        path.write_text(content)
        with pytest.raises(SurgeryError, match=r"plan\.yaml: not a plan file"):
            read_plan(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "8 potatoes"}, "not a size"),
        ({"memory": "0GiB"}, "not a size"),
        ({"memory": "8"}, "has no unit"),
        ({"context": "long"}, "must be a number of tokens"),
        ({"context": "0"}, "at least 1"),
        ({"memory": "1GiB", "kv_ratio": 0.5}, "exclude each other"),
        ({"allow": "lowrank,nothing"}, "unknown allow nothing; choose from"),
        ({"calibration": "none"}, "needs text"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, message):
    with pytest.raises(SurgeryError, match=message):
        PlanSettings.from_mapping(settings, "plan")


def test_contexts_are_read_as_people_write_them():
    assert [parse_tokens(text) for text in ("32k", "1,024", "7")] == [32768, 1024, 7]


def test_the_verb_prints_a_table_and_writes_plan_and_picture(checkpoints, tmp_path, monkeypatch, capsys):
    text = [f"--{name.replace('_', '-')}={value}" for name, value in {**TEXT, "context": 1024}.items()]
    arguments = ["plan", checkpoints("llama"), "--kv-ratio", "0.5", "--allow", "lowrank,quantized,bits", *text]
    code, out, error = run_main(
        *(monkeypatch, capsys, *arguments, "--out", tmp_path / "plan.yaml", "--plot", tmp_path / "plan.svg"),
    )
    assert code == 0, error
    assert "within the budget" in out
    assert "--bits auto" in " ".join(out.split())
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["to"] in ("lowrank", "quantized")
    assert "lowrank, bits auto" in (tmp_path / "plan.svg").read_text()
    beyond = "context 1,024 exceeds the model's 256 positions"
    assert beyond in out and beyond in error
    code, _, error = run_main(monkeypatch, capsys, *arguments, "--out", tmp_path / "plan.yaml")
    assert code == 1 and "exists" in error


def test_a_dry_run_lists_what_would_be_tried_and_writes_nothing(tmp_path, monkeypatch, capsys):
    source = make_checkpoint(tmp_path / "source", "llama")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    command = ["plan", source, "--kv-ratio", "0.5", "--context", "64", "--out", tmp_path / "plan.yaml", "--dry-run"]
    code, shown, _ = run_main(monkeypatch, capsys, *command, "--json")
    forecast = json.loads(shown)
    assert code == 0 and sorted(tmp_path.rglob("*")) == before
    assert {"lowrank", "mla"} <= {row["name"].split()[1] for row in forecast["candidates"]}
    assert all(0 < row["kv_ratio"] <= 0.5 for row in forecast["candidates"] if "--kv-ratio" in row["name"])
    assert forecast["work"]["estimated_seconds"] > 0
    code, shown, _ = run_main(monkeypatch, capsys, *command)
    assert code == 0 and forecast["candidates"][0]["name"] in shown
