"""Question answering: generated stand-ins for RULER's `qa_1` (SQuAD) and `qa_2` (HotpotQA), which need a download.

Documents are about invented people and companies, so that no model can know the answers. One kind asks for a fact that
one document states; the other needs two documents, the first of which only names the second. Scores compare between
models, and not with published scores of RULER.
"""

from __future__ import annotations

import random

from surgery.eval.ruler.sample import Draft, Setting
from surgery.eval.word_lists import ADJECTIVES, NOUNS, draw_distinct

# fmt: off
STARTS = ("Al", "Bel", "Cor", "Dan", "El", "Far", "Gal", "Hal", "Is", "Jor", "Kel", "Lor", "Mar", "Nor", "Or", "Per",
          "Quil", "Ros", "Sel", "Tor", "Ul", "Ver", "Wil", "Yor", "Zel")
MIDDLES = ("a", "am", "an", "ar", "e", "em", "en", "er", "i", "im", "in", "o", "om", "on", "or", "u")
PERSON_ENDS = ("bert", "dis", "dra", "lan", "lia", "mir", "na", "nor", "ric", "sa", "vin", "wen")
TOWN_ENDS = ("bridge", "burg", "dale", "field", "ford", "haven", "holm", "mouth", "port", "stead", "ville", "wick")
FIRMS = ("Bakeries", "Bearings", "Foods", "Instruments", "Motors", "Press", "Shipping", "Textiles", "Timber", "Toys")
TRADES = ("a baker", "a carpenter", "a dentist", "an engineer", "a gardener", "a lawyer", "a pilot", "a teacher")
# fmt: on

PERSON = (
    "{name} was born in {town} in {year} and trained as {trade}. After some years abroad, {name} "
    "came home and wrote a short book about the {adjective} {noun}."
)
EMPLOYEE = (
    "{name} is {trade} who has worked for {firm} since {year}. Friends know {name} as the owner "
    "of {article} {adjective} {noun}."
)
FIRM = (
    "{firm} is a company that was founded in {year} and became known for its {adjective} {noun}. "
    "The headquarters of {firm} are in {town}."
)


def draft_one_hop(setting: Setting, size: int) -> Draft:
    """`size` documents, each about a person; one of them states what is asked for."""
    names, towns = _names(setting, size), _towns(setting, size)
    details = setting.rng("details")
    documents = [
        PERSON.format(name=name, town=town, **_details(details)) for name, town in zip(names, towns, strict=True)
    ]
    return _draft(setting, documents, f"In which town was {names[0]} born?", towns[0])


def draft_two_hops(setting: Setting, size: int) -> Draft:
    """`size` documents, of people and of the companies they work for; a person's document names only the company."""
    count = (size + 1) // 2
    names, firms, towns = _names(setting, count), _firms(setting, count), _towns(setting, count)
    details = setting.rng("details")
    documents = []
    for name, firm, town in zip(names, firms, towns, strict=True):
        documents.append(EMPLOYEE.format(name=name, firm=firm, **_details(details)))
        documents.append(FIRM.format(firm=firm, town=town, **_details(details)))
    question = f"In which town are the headquarters of the company that {names[0]} works for?"
    return _draft(setting, documents[:size], question, towns[0])


def _draft(setting: Setting, documents: list[str], question: str, answer: str) -> Draft:
    domain = setting.domain
    setting.rng("order").shuffle(documents)
    numbered = [domain.document.format(number=number, text=text) for number, text in enumerate(documents, 1)]
    context = domain.documents_join.join(numbered)
    return Draft(domain.ask.format(context=context, question=question), (answer,))


def _names(setting: Setting, count: int) -> list[str]:
    def draw(rng: random.Random) -> str:
        first, last = (rng.choice(STARTS) + rng.choice(MIDDLES) + rng.choice(PERSON_ENDS) for _ in range(2))
        return f"{first} {last}"

    return draw_distinct(setting.rng("names"), draw, count)


def _towns(setting: Setting, count: int) -> list[str]:
    def draw(rng: random.Random) -> str:
        return rng.choice(STARTS) + rng.choice(MIDDLES) + rng.choice(MIDDLES) + rng.choice(TOWN_ENDS)

    return draw_distinct(setting.rng("towns"), draw, count)


def _firms(setting: Setting, count: int) -> list[str]:
    def draw(rng: random.Random) -> str:
        return f"{rng.choice(STARTS)}{rng.choice(MIDDLES)}{rng.choice(PERSON_ENDS)} {rng.choice(FIRMS)}"

    return draw_distinct(setting.rng("firms"), draw, count)


def _details(rng: random.Random) -> dict[str, str]:
    adjective = rng.choice(ADJECTIVES)
    return {
        "year": str(rng.randint(1900, 1999)),
        "trade": rng.choice(TRADES),
        "adjective": adjective,
        "article": "an" if adjective[0] in "aeiou" else "a",
        "noun": rng.choice(NOUNS),
    }
