import re
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest
from sessions import session
from tiny_models import HELD_OUT

import surgery.eval.tasks.ruler as ruler_task
from surgery.common.errors import SurgeryError
from surgery.eval.haystack import python_reference
from surgery.eval.recall import FACT, NAMES, QUESTION
from surgery.eval.ruler.domain import CODE, DOMAINS, TEXT
from surgery.eval.ruler.niah import DEPTHS
from surgery.eval.ruler.sample import Sample
from surgery.eval.ruler.suite import TASKS, build
from surgery.eval.tasks.ruler import RulerTask

LENGTH = 1536
SOURCE = HELD_OUT.read_text(encoding="utf-8")[:60_000]


@pytest.fixture(scope="module")
def haystacks():
    return {"text": TEXT.split(python_reference()), "code": CODE.split(SOURCE)}


@pytest.fixture(scope="module")
def samples(tokenizer, haystacks):
    """Gives three samples of a task in a domain."""
    results = {}

    def get(task, domain="text", length=LENGTH):
        key = (task, domain, length)
        if key not in results:
            results[key] = build(task, tokenizer, length, 3, 0, DOMAINS[domain], haystacks[domain])
        return results[key]

    return get


EVERY = pytest.mark.parametrize("domain,task", [(domain, task) for domain in DOMAINS for task in TASKS])


def test_the_suite_is_the_paper_s_but_for_question_answering():
    needles = [name for name in TASKS if name.startswith("niah")]
    assert len(TASKS) == 11 and len(needles) == 8
    budgets = {name: spec.new_tokens["text"] for name, spec in TASKS.items()}
    assert {budgets[name] for name in needles} == {128}
    assert [budgets[name] for name in ("vt", "cwe", "fwe")] == [30, 120, 50]


@EVERY
def test_prompts_fill_the_length_and_hold_the_answer_for_which_an_oracle_scores_one(tokenizer, samples, domain, task):
    for sample in samples(task, domain):
        assert sample.ids[0] == tokenizer.bos_token_id
        assert list(sample.ids[1:]) == tokenizer(sample.prompt, add_special_tokens=False).input_ids
        assert sample.new_tokens == TASKS[task].new_tokens[domain]
        # The largest unit is a document or a line with two uuids.
        assert LENGTH - 120 < len(sample.ids) + sample.new_tokens <= LENGTH
        assert all(reference in sample.prompt for reference in sample.references)
        assert sample.score(" They are: " + "; ".join(sample.references).upper()) == 1.0
        assert sample.score("") == 0.0 and sample.score("none of them 1234") == 0.0
        assert len(tokenizer(" " + ", ".join(sample.references)).input_ids) <= sample.new_tokens


@EVERY
def test_the_seed_and_the_number_decide(tokenizer, haystacks, samples, domain, task):
    first, other = (build(task, tokenizer, LENGTH, 1, seed, DOMAINS[domain], haystacks[domain])[0] for seed in (0, 1))
    three = samples(task, domain)
    assert first == three[0] and first.ids != other.ids and first.references != other.references
    assert len({sample.references for sample in three}) == 3


def test_scores_are_shares_of_the_references():
    sample = Sample("", (), ("Alpha", "beta", "12"), 5)
    assert sample.score("ALPHA 112") == pytest.approx(2 / 3)


@pytest.mark.parametrize("task,kind", [("niah_single_2", "number"), ("niah_single_3", "uuid")])
def test_one_needle_in_prose(samples, task, kind):
    for sample in samples(task):
        matches = re.findall(rf"One of the special magic {kind}s for ([a-z]+-[a-z]+) is: (\S+)\.", sample.prompt)
        assert len(matches) == 1
        (key, value), text = matches[0], sample.prompt
        assert sample.references == (value,)
        assert text.startswith(
            f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n"
        )
        assert text.endswith(
            f"\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
            f"The special magic {kind} for {key} mentioned in the provided text is"
        )
        if kind == "number":
            assert re.fullmatch(r"[1-9]\d{6}", value)
        else:
            assert uuid.UUID(value).version == 4


def test_a_needle_in_noise(samples):
    for sample in samples("niah_single_1"):
        lines = Counter(sample.prompt.split("\n")[1:-1])
        noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
        assert lines.pop(noise) > 20 and len(lines) == 1 and next(iter(lines)).startswith("One of the special magic")


def needles(prompt, kind="numbers"):
    return re.findall(rf"One of the special magic {kind} for (\S+) is: (\S+)\.", prompt)


def test_several_needles_in_prose(samples):
    for sample in samples("niah_multikey_1"):
        pairs = dict(needles(sample.prompt))
        assert len(pairs) == 4 and len(needles(sample.prompt)) == 4
        match = re.search(r"magic number for (\S+) mentioned in the provided text is$", sample.prompt)[1]
        assert sample.references == (pairs[match],)
    for sample in samples("niah_multivalue"):
        keys, values = zip(*needles(sample.prompt), strict=True)
        assert len(set(keys)) == 1 and set(values) == set(sample.references) and len(set(values)) == 4
        assert sample.prompt.endswith(
            f"What are all the special magic numbers for {keys[0]} mentioned in the provided text? "
            f"The special magic numbers for {keys[0]} mentioned in the provided text are"
        )
        assert sample.prompt.startswith("Some special magic numbers are hidden within the following text. ")
    for sample in samples("niah_multiquery"):
        pairs = dict(needles(sample.prompt))
        a, b, c, d = re.search(r"numbers for (\S+), (\S+), (\S+), and (\S+) mentioned.* are$", sample.prompt).groups()
        assert len(pairs) == 4 and sample.references == tuple(pairs[key] for key in (a, b, c, d))


@pytest.mark.parametrize("task,kind", [("niah_multikey_2", "numbers"), ("niah_multikey_3", "uuids")])
def test_a_haystack_of_needles(samples, task, kind):
    for sample in samples(task):
        lines, pairs = sample.prompt.split("\n")[1:-1], needles(sample.prompt, kind)
        assert len(lines) == len(pairs) == len(dict(pairs)) > 10
        match = re.search(r"for (\S+) mentioned in the provided text is$", sample.prompt)[1]
        assert dict(pairs)[match] == sample.references[0]
        if kind == "uuids":
            assert all(uuid.UUID(part).version == 4 for pair in pairs for part in pair)


def test_depths_and_sentence_ends(samples):
    assert len(DEPTHS) == 40 and DEPTHS[0] == 0 and DEPTHS[-1] == 100 and list(DEPTHS) == sorted(set(DEPTHS))
    for sample in samples("niah_multikey_1"):
        context = sample.prompt.split("\n")[1]
        for before in re.findall(r"(.)\s*One of the special magic", context):
            assert before in ".?!"


def test_a_chain_of_four_hops(samples):
    for sample in samples("vt"):
        example, _, prompt = sample.prompt.partition("\n\n\n\n")
        value, root = re.search(r"VAR (\w{5}) = (\d{5}) ", prompt).group(2, 1)
        hops = re.findall(r"VAR (\w{5}) = VAR (\w{5})  ", prompt)
        assert len(hops) == 4 and sample.references == (root, *(name for name, _ in hops))
        assert [source for _, source in hops] == list(sample.references[:-1])
        assert prompt.endswith(
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
            "the chain(s) of variable assignment in the text above, 5 variables are assgined the value "
            f"{value}, they are:"
        )
        match = re.search(r"they are: (\w{3}) (\w{3}) (\w{3}) (\w{3}) (\w{3})$", example)
        assert re.findall(r"VAR (\w{3}) = ", example) == list(match.groups())


@pytest.mark.parametrize("length,often,seldom", [(LENGTH, 6, 1), (4608, 30, 3), (9216, 30, 3)])
def test_common_words(samples, length, often, seldom):
    for sample in samples("cwe", length=length):
        example, _, prompt = sample.prompt.rpartition("\nBelow is a numbered list")
        assert example.startswith("Below is a numbered list") and re.search(
            r"in the list are:1\. .* 10\. \S+$", example
        )
        numbered = re.findall(r"(\d+)\. (\S+)", prompt.split("\n")[1])
        assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
        counts = Counter(word for _, word in numbered)
        assert {word for word, count in counts.items() if count == often} == set(sample.references)
        assert len(sample.references) == 10 and set(counts.values()) == {often, seldom}
        assert sample.prompt.endswith(
            "\nQuestion: What are the 10 most common words in the above list? "
            "Answer: The top 10 words that appear most often in the list are:"
        )


def test_frequent_words(samples):
    for sample in samples("fwe"):
        words = re.search(r"appeared coded words\. (.*)\nQuestion", sample.prompt)[1].split()
        (dots, limit), *others = Counter(words).most_common()
        assert dots == "..." and sample.references == tuple(word for word, _ in others[:3])
        # size / ζ(2) / k² rounded down, for a size that the first rank gives to within one.
        for rank, (word, count) in enumerate(others[:3], 2):
            assert limit / rank**2 - 1 <= count <= (limit + 1) / rank**2
            assert re.fullmatch("[a-z]{6}", word)
        assert others[2][1] > others[3][1]


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"])
def test_needles_in_code_are_those_of_planted_recall(samples, task):
    for sample in samples(task, "code"):
        name = re.search(r"# Recall: the secret key of (\w+) is$", sample.prompt)[1]
        assert sample.prompt.endswith(QUESTION.format(name=name))
        assert FACT.format(name=name, value=sample.references[0]) in sample.prompt
        assert set(re.split("_", name)) <= set(NAMES) and re.fullmatch(r"\d{5}", sample.references[0])
        facts = re.findall(r"# The secret key of (\w+) is", sample.prompt)
        assert len(facts) == len(set(facts))
        if task == "niah_multikey_2":
            assert len(facts) > 24 and all("_" in fact for fact in facts)


def test_code_of_variable_tracking_runs(samples):
    for sample in samples("vt", "code"):
        variables = {}
        exec(sample.prompt.partition("\n\n\n\n")[2], variables)
        value = int(re.search(r"equal to (\d+):$", sample.prompt)[1])
        assert [name for name in variables if variables[name] == value] == list(sample.references)


@EVERY
def test_a_length_that_cannot_be_met_is_refused(tokenizer, haystacks, domain, task):
    with pytest.raises(SurgeryError, match=rf"task {task} does not fit in 40 tokens: .*; use a greater") as refusal:
        build(task, tokenizer, 40, 1, 0, DOMAINS[domain], haystacks[domain])
    least = int(re.search(r"take (\d+);", str(refusal.value))[1])
    if task not in ("vt", "fwe"):  # whose shape depends on the length
        build(task, tokenizer, least + 60, 1, 0, DOMAINS[domain], haystacks[domain])


def test_the_task_scores_an_oracle_one_and_silence_zero(tokenizer, monkeypatch):
    task = RulerTask(lengths=(1024, 1100), samples=3, domain="code", haystack=SOURCE)
    model = SimpleNamespace()
    for answers, expected in ((True, 1.0), (False, 0.0)):

        def complete(model, session, prompts, new_tokens, label, answers=answers):
            name, length = re.fullmatch(r"(\w+), (\d+) tokens", label).groups()
            built = build(name, tokenizer, int(length), 1, 5, CODE, CODE.split(SOURCE))
            assert [tuple(prompt) for prompt in prompts] == [sample.ids for sample in built]
            text = [" ".join(sample.references) if answers else "" for sample in built]
            return [tokenizer(line, add_special_tokens=False).input_ids for line in text]

        monkeypatch.setattr(ruler_task, "complete", complete)
        result = task.run(model, session(tokenizer, seed=5, limit=1), None)
        assert result["average"] == expected and list(result["lengths"]) == ["1024", "1100"]
        for length in result["lengths"].values():
            assert list(length["tasks"]) == list(TASKS) and length["average"] == expected
            assert all(entry["scores"] == [expected] for entry in length["tasks"].values())


def test_settings_tell_data_apart(tokenizer):
    first, again, other = (RulerTask(haystack=text).settings() for text in ("a b.", "a b.", "a c."))
    assert first == again and first != other
    assert RulerTask().settings() == RulerTask(haystack=python_reference()).settings()


@pytest.mark.parametrize(
    "options,message", [({"tasks": ("niah",)}, "no RULER-style task 'niah'"), ({"haystack": " "}, "empty")]
)
def test_bad_requests(options, message):
    with pytest.raises(SurgeryError, match=message):
        RulerTask(**options)
