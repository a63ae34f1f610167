"""Buffers that are sent without a copy."""

from __future__ import annotations

import numpy as np
import pytest

from checkrun_format.stores.bodies import Body, Received

WHOLE = b"abc" + bytes(range(10)) + b"x" * (1 << 20) + b"end"


def body() -> Body:
    return Body(
        [
            b"abc",
            b"",
            np.zeros(0, np.uint8),
            np.arange(10, dtype=np.uint8),
            np.full((1 << 10, 1 << 10), 120, np.uint8),
            b"end",
        ]
    )


def test_a_body_is_its_buffers() -> None:
    assert len(body()) == len(WHOLE)
    assert body().read() == WHOLE
    assert b"".join(body().pieces(0, len(WHOLE))) == WHOLE
    assert all(0 < piece.nbytes <= 1 << 20 for piece in body().pieces(0, len(WHOLE)))
    assert len(Body([])) == 0 and Body([b""]).read() == b""


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 3), (2, 5), (4, 4), (12, 14), (13, (1 << 20) + 13), ((1 << 20) + 12, (1 << 20) + 16)]
)
def test_any_range_of_a_body(start: int, stop: int) -> None:
    assert b"".join(body().pieces(start, stop)) == WHOLE[start:stop]


def test_a_body_is_read_in_steps_and_again() -> None:
    """As botocore signs it, and sends it again."""
    found = body()
    for _ in range(2):
        assert found.seek(0) == 0
        steps = []
        while step := found.read(999_999):
            steps.append(step)
        assert b"".join(steps) == WHOLE
        assert found.tell() == len(WHOLE)
    assert found.seek(-3, 2) == len(WHOLE) - 3 and found.read() == b"end"
    found.seek(3)
    assert found.seek(1, 1) == 4 and found.read(2) == WHOLE[4:6]


def test_what_was_received_is_read_once() -> None:
    file = Received([b"abc", b"", b"defgh", b"i"])
    into = bytearray(2)
    assert (file.readinto(into), bytes(into)) == (2, b"ab")
    assert file.read(1) == b"c"
    assert file.readall() == b"defghi"
    assert file.read(1) == b"" and file.readable()
