from __future__ import annotations

import pytest
from stepgym_search.document import Document
from stepgym_search.encyclopedia.reader import read_answers, read_article
from stepgym_search.encyclopedia.relations import UNKNOWN, UNKNOWN_RULE

from stepgym.errors import UserError

MORVA = Document(
    "0", '"Morva"\nMorva is a novel written by Lena Tarek and published in Kelda. It was revised on 4 May 1790.'
)
LIFE = Document("1", '"Lena Tarek"\nLena Tarek, also called Olu Erim, was a poet born in Orvel and buried in Kelda.')
ORVEL = Document("2", '"Orvel"\nOrvel, also called the Gate of Kelda, is a town chartered on March 12, 1302.')
BASTO = Document(
    "3", '"Basto"\nBasto is a town. The charter of Basto is dated 1 June 1290. Scholars still argue about Basto.'
)
DAY = ["12 March 1302", "March 12, 1302", "1302-03-12"]


def test_facts_are_read_from_sentences() -> None:
    reading = read_article(MORVA)
    assert (reading.name, reading.category, reading.alias) == ("Morva", "work", None)
    assert reading.facts == {
        "author": ["Lena Tarek"],
        "publication_place": ["Kelda"],
        "revision_date": ["4 May 1790"],
    }
    assert read_article(LIFE).alias == "Olu Erim"
    assert read_article(BASTO).facts == {"charter_date": ["1 June 1290"]}


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        ("Who wrote Morva?", ["Lena Tarek", "Olu Erim"]),
        ("Where was the author of Morva born?", ["Orvel", "the Gate of Kelda"]),
        ("When was the town where Olu Erim was born chartered?", DAY),
        (
            "When was the birthplace of the author of Morva chartered?",
            DAY,
        ),
        ("Which town was chartered earlier, the Gate of Kelda or Basto?", ["Basto"]),
        ("Which town was chartered later, Basto or Orvel?", ["Orvel", "the Gate of Kelda"]),
        ("Who translated Morva?" + UNKNOWN_RULE, list(UNKNOWN)),
        ("Who taught the author of Morva?" + UNKNOWN_RULE, list(UNKNOWN)),
    ],
)
def test_questions_are_answered_from_the_articles(question: str, answers: list[str]) -> None:
    assert read_answers(question, [BASTO, LIFE, MORVA, ORVEL]) == answers


@pytest.mark.parametrize(
    ("question", "documents", "message"),
    [
        ("Who translated Morva?", [MORVA], "the articles do not answer 'Who translated Morva"),
        ("Where was the author of Morva born?", [MORVA], "the articles do not answer"),
        ("Where was the author of Sumbu born?", [MORVA, LIFE], "can be taken in 0 ways"),
        ("Why was Morva written?", [MORVA], "can be taken in 0 ways"),
        ("Which town was chartered earlier, Orvel or Basto?", [BASTO], "can be taken in 0 ways"),
        ("Who was born earlier, Lena Tarek or Olu Erim?", [LIFE], "do not tell which comes first"),
        ("Who was born earlier, Lena Tarek or Morva?", [LIFE, MORVA], "do not tell which comes first"),
    ],
)
def test_what_the_articles_do_not_prove_is_an_error(question: str, documents: list[Document], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_answers(question, documents)


def test_a_question_that_can_be_taken_in_two_ways_is_an_error() -> None:
    homonym = Document("9", '"Basto"\nBasto, also called the birthplace of Lena Tarek, is a town.')
    with pytest.raises(UserError, match="can be taken in 2 ways"):
        read_answers("When was the birthplace of Lena Tarek chartered?", [LIFE, ORVEL, homonym])


def test_an_article_that_contradicts_itself_is_an_error() -> None:
    twice = Document("1", LIFE.contents + " The birthplace of Lena Tarek was Basto.")
    with pytest.raises(UserError, match=r"about Lena Tarek contradicts itself: birthplace is \['Orvel', 'Basto'\]"):
        read_answers("Where was Lena Tarek born?", [twice])
    same = Document("1", LIFE.contents + " The birthplace of Lena Tarek was Orvel.")
    assert read_answers("Where was Lena Tarek born?", [same]) == ["Orvel"]


def test_two_articles_with_one_name_are_an_error() -> None:
    other = Document("9", '"Morva"\nMorva is a novel written by Basto.')
    with pytest.raises(UserError, match="two articles are called 'Morva'"):
        read_answers("Who wrote Morva?", [MORVA, other])
    taken = Document("9", '"Basto"\nBasto, also called Olu Erim, is a town.')
    with pytest.raises(UserError, match="two articles are called 'Olu Erim'"):
        read_answers("Who wrote Morva?", [LIFE, taken])


@pytest.mark.parametrize(
    "text",
    [
        "Morva sings.",
        "Morva is a boat.",
        "Sumbu is a novel.",
        "Morva is a novel sung by Lena Tarek.",
        "Morva is a novel. The author of Sumbu is Lena Tarek.",
        "Morva is a novel. It was born in Kelda.",
    ],
)
def test_a_sentence_that_is_none_of_an_encyclopedias_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="search: "):
        read_article(Document("0", f'"Morva"\n{text}'))
