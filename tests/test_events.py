"""The event log: whole lines only, whatever a crash has left of the last one."""

import pytest

from pipeline.record import events
from pipeline.record.events import EventLog, read, to_line

FIRST, SECOND, THIRD = ({"event": "steps", "step": step} for step in (1, 2, 3))


@pytest.mark.parametrize("cut", range(1, len(to_line(SECOND))))
def test_a_line_that_was_cut_short_is_not_replayed_and_gone_once_the_log_is_opened_again(tmp_path, cut):
    path = tmp_path / "events.jsonl"
    path.write_bytes(to_line(FIRST) + to_line(SECOND)[:cut])
    assert [event for event, _ in read(path)] == [FIRST]
    log = EventLog(path)
    log.append(THIRD)
    log.close()
    assert path.read_bytes() == to_line(FIRST) + to_line(THIRD)
    assert list(read(path)) == [(FIRST, len(to_line(FIRST))), (THIRD, path.stat().st_size)]


@pytest.mark.parametrize("size", [events.BLOCK_BYTES - 1, events.BLOCK_BYTES, 3 * events.BLOCK_BYTES + 1])
def test_a_cut_line_of_any_length_is_found_from_the_end(tmp_path, size):
    path = tmp_path / "events.jsonl"
    path.write_bytes(to_line(FIRST) + b"x" * size)
    EventLog(path).close()
    assert path.read_bytes() == to_line(FIRST)
    path.write_bytes(b"x" * size)
    EventLog(path).close()
    assert path.read_bytes() == b""


def test_whole_lines_stay_as_they_are(tmp_path):
    path = tmp_path / "events.jsonl"
    for event in (FIRST, SECOND):
        log = EventLog(path)
        log.append(event)
        log.close()
    assert path.read_bytes() == to_line(FIRST) + to_line(SECOND)
