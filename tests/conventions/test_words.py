"""No sentence of a comment, docstring or page begins with Who, What, Whoever or Whatever, unless it
asks: such a clause has no subject that a reader could name."""

from __future__ import annotations

import re
from pathlib import Path

from conventions.sources import files, name_of, prose
from support.processes import ROOT

#: A sentence begins where the text does, after the end of another, after an empty line or a dash.
SENTENCE = re.compile(
    r"(?:\A\W*|[.!?]\s+|\n\s*\n\W*|\n\s*[-*] )"
    r"(?P<all>(?:Who|What)(?:ever)?\b(?![.`_(])[^.!?]*(?P<end>[.!?]|\Z))"
)


def subjectless(path: Path) -> list[str]:
    """Such sentences, each with its place."""
    return [
        f"{name_of(path)}:{line + text.count(chr(10), 0, found.start('all'))}: "
        f"{' '.join(found['all'].split())[:80]}"
        for line, text in prose(path)
        for found in SENTENCE.finditer(text)
        if found["end"] != "?"
    ]


def test_sentences_have_subjects() -> None:
    found = [line for path in files("python", "c", "shell") for line in subjectless(path)]
    assert not found, "\n".join(found)


def test_sentences_of_the_pages_have_subjects() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests" / "README.md"]
    assert len(pages) > 20
    found = []
    for page in pages:
        text = re.sub(
            r"^(?:```.*?^```|#[^\n]*)", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        for sentence in SENTENCE.finditer(text):
            if sentence["end"] != "?":
                found.append(f"{page.name}: {' '.join(sentence['all'].split())[:80]}")
    assert not found, "\n".join(found)


def test_a_question_is_no_such_sentence(tmp_path: Path) -> None:
    text = '"""Text.\n\nWho waits is woken. What is it? The rest. Whatever comes\nnext goes."""\n'
    (tmp_path / "file.py").write_text(text)
    (line, docstring), *_ = prose(tmp_path / "file.py")
    found = [each["all"] for each in SENTENCE.finditer(docstring) if each["end"] != "?"]
    assert line == 1
    assert found == ["Who waits is woken.", "Whatever comes\nnext goes."]
