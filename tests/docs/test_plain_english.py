"""Help for editors: finds sentences that a reader has to read twice, and names their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_WORDS = 35
"""In one sentence."""

PATTERNS = {
    r"\bso (many|much|long|few) (times|as)\b": "say the number, or 'N times faster than X'",
    r"\bas (many|much|few) as\b": "say the number, or 'the same number of X as Y'",
    r"(?<!\bask )\bof (which|whom|those)\b": "begin a new sentence, and name the thing again",
    r"\b(with|in|on|by|from) which\b": "begin a new sentence, and name the thing again",
    r"\b(goes|go|going|went) on\b": "continue, or keep",
    r"\bdo(es)? (no|much) harm\b": "say what happens: 'loses accuracy', 'costs nothing'",
    r"\b(hands|handed) (out|over|to|on)?\b": "give, pass or send",
    r"\b(stands|stood) (for|beside|in|still)\b": "is, means, or compare with",
    r"\bwhoever\b": "if you ...",
    r"\b(is|are|was|were) of (?!type|shape|order|the same|any|this kind)\b": "has, comes from, or belongs to",
}
BY_HAND = sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NOT_YET = {"CHANGELOG.md"}
"""Pages that no editor has been through yet."""


def without_code(text: str) -> str:
    """The text with as many lines, where code, tables, comments, formulas and pictures are blank lines."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"^( *)```.*?^\1```$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = re.sub(r"^( *\||    ).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The number of the line in which each sentence of a page begins, and the sentence."""
    text = without_code(text)
    begins = 0
    for match in re.finditer(r"[.?!:](?=[*_)\"]*\s)|\n\s*\n|\n(?=\s*([-*]|\d+\.|#) )|(?<=\n)#.*\n|\Z", text):
        sentence = text[begins : match.end()]
        words = re.sub(r"`[^`]*`", "code", sentence)
        line = 1 + text.count("\n", 0, begins + len(sentence) - len(sentence.lstrip()))
        begins = match.end()
        if words.strip():
            yield line, " ".join(words.split())


def complaints(text: str) -> list[str]:
    """What an editor should look at."""
    found = []
    for line, sentence in sentences(text):
        if (count := len(re.findall(r"\S*\w\S*", sentence))) > MOST_WORDS:
            found.append(f"line {line}: {count} words; make two sentences of: {sentence}")
        for pattern, advice in PATTERNS.items():
            if (match := re.search(pattern, sentence, re.IGNORECASE)) is not None:
                found.append(f"line {line}: '{match[0].strip()}': {advice}: {sentence}")
    return found


def test_a_long_sentence_and_a_pattern_are_found_with_their_lines() -> None:
    page = "# Title\n\nA short one. It\n\n```\nof which\n```\n\n- Whoever\n  has it goes on.\n\n" + "word " * 36 + ".\n"
    assert [complaint.split(":")[0] for complaint in complaints(page)] == ["line 9", "line 9", "line 12"]


@pytest.mark.parametrize("name", [name for name in BY_HAND if name not in NOT_YET])
def test_nothing_on_the_page_has_to_be_read_twice(name: str) -> None:
    assert complaints((ROOT / name).read_text(encoding="utf-8")) == []
