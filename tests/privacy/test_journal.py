"""Journals: durable lines in a chain, shared by processes, and what is noticed when one is changed."""

from __future__ import annotations

import pytest

from pomona.errors import PomonaError
from pomona.privacy.journal import Journal


def open_journal(path):
    """Return a journal and the list of the entries that it receives."""
    entries = []
    return Journal(path, lambda entry, checksum: entries.append(entry)), entries


def write_lines(path, count=4):
    journal, _ = open_journal(path)
    for k in range(count):
        journal.append(lambda k=k: {"k": k})


def test_entries_are_read_back_and_shared(tmp_path):
    path = tmp_path / "a.jsonl"
    (one, seen), (other, others) = open_journal(path), open_journal(path)
    one.append(lambda: {"k": 0})
    other.append(lambda: {"k": len(others)})  # it has received the first entry before it makes its own
    one.append(lambda: None)
    assert seen == others == [{"k": 0}, {"k": 1}]
    again, found = open_journal(path)
    again.read()
    assert found == seen
    assert again.checksum == one.checksum


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_line_that_was_cut_off_is_dropped(tmp_path, cut):
    path = tmp_path / "a.jsonl"
    write_lines(path, 2)
    whole = path.read_bytes()
    write_lines(path, 1)
    added = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + added[:cut])
    path.with_suffix(".head").write_text("2 x\n")  # a kill came before the line was confirmed
    write_lines(path, 1)
    journal, entries = open_journal(path)
    journal.read()
    assert entries == [{"k": 0}, {"k": 1}, {"k": 0}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "it has 3 of 4 lines"),
        (lambda lines: lines[1:], "line 1 does not match"),
        (lambda lines: [*lines[:1], lines[1].replace(b"1,", b"7,"), *lines[2:]], "line 2 does not match"),
        (lambda lines: [*lines[:2], lines[3], lines[2]], "line 3 does not match"),
        (lambda lines: [*lines[:2], b"{}\n", *lines[2:]], "line 3 does not match"),
    ],
)
def test_changed_journals_are_refused(tmp_path, change, message):
    path = tmp_path / "a.jsonl"
    write_lines(path)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(PomonaError, match=message):
        open_journal(path)[0].read()


def test_journal_that_shrinks_while_it_is_open_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    journal, _ = open_journal(path)
    journal.append(lambda: {"k": 0})
    path.write_bytes(b"")
    with pytest.raises(PomonaError, match="lost lines after line 1"):
        journal.append(lambda: {"k": 1})


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PomonaError, match="cannot be written .*nothing of this step was released"):
        open_journal(tmp_path / "file" / "a.jsonl")[0].append(lambda: {"k": 0})
