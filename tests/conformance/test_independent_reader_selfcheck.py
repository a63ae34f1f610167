"""The independent reader against the run of independent_run.py and the worked example of section 14."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.conformance import independent_reader as reader
from tests.conformance.independent_changes import changes
from tests.conformance.independent_reader import FormatError
from tests.conformance.independent_run import (
    CHECKPOINTS,
    GROUP,
    PRUNED,
    ROW_0,
    ROW_1,
    ROW_2,
    ROW_4,
    RUN,
    TOP,
    Array,
    Json,
    Writer,
    array,
    base,
    branch,
    frame,
    held,
    increment,
    of,
    put,
    rollback,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    put(tmp_path / "zarr.json", frame(RUN))
    for write in CHECKPOINTS:
        write(tmp_path)
    return tmp_path


def same(found: Array, expected: Any, dtype: str) -> bool:
    """Equal bit for bit, NaN payloads and signs of zero included."""
    wanted = np.asarray(expected, getattr(ml_dtypes, dtype, dtype))
    return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def kind(call: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(FormatError) as caught:
        call(*arguments)
    return caught.value.kind


def everything(run: Path, *numbers: int) -> list[Any]:
    """All values of some checkpoints, and the changes up to them, in a form that compares bit for bit."""
    found: list[Any] = []
    for n in numbers:
        c = reader.Checkpoint(run, n)
        found += [(n, t, f, v.tobytes()) for t in c.tables() for f, v in c.table(t).items()]
        found += [(t, c.tensor(t).tobytes()) for t in c.tensors()] + [c.extra(), c.commit["step"]]
        found += [c.blob(entry["name"]) for entry in c.manifest["blobs"]]
        touched, dropped = changes(run, 1, n)
        found += [dropped, [(t, a.tobytes(), b.tobytes()) for t, (a, b) in touched.items()]]
    return found


def test_tables(run: Path) -> None:
    c, second, fourth = (reader.Checkpoint(run, n) for n in (1, 2, 4))
    assert (reader.latest(run), c.commit["step"], c.tables()) == (6, 10, ["emb", "users"])
    assert same(c.table("emb")["weight"], [ROW_0, ROW_1, ROW_2, [7] * 5, ROW_4], "float32")
    assert same(c.table("emb")["sum"], [0.5, 1.5, 2.5, -0.0, 4.5], "float32")
    assert same(c.table("users")[""], [TOP, 3, 7, 9], "uint64")
    assert same(c.table("users")["v"], [-20, 30, 70, 90], "int16")
    assert same(second.table("emb")["weight"], [ROW_0, ROW_1, ROW_2, [7] * 5, ROW_0, ROW_2[::-1]], "float32")
    assert same(second.table("users")[""], [TOP, 7, 9, 12], "uint64")
    assert same(second.table("users")["v"], [-20, 77, 90, 120], "int16")
    assert same(fourth.table("emb")["weight"], [[1.1, 2.2, 3, 4, 5], ROW_1, ROW_2, [7] * 5, ROW_4], "float32")
    assert same(fourth.table("brief")["x"], [[False, True], [True, True]], "bool")
    assert (c.extra(), c.blob("rng"), c.tensors()) == ({"lr": 1}, b"abc", ["w", "s", "h", "none"])
    assert same(c.tensor("w"), [[1, 2, 3], [4, 5, 6]], "float32")
    assert same(c.tensor("none"), np.zeros((0, 4)), "bool")
    assert same(c.tensor("h"), of("uint16", [0x3F80, 0xC000, 0x7FC1]).view(ml_dtypes.bfloat16), "bfloat16")
    assert [kind(c.table, "x"), kind(c.tensor, "x"), kind(c.blob, "x")] == ["table_not_found", "not_found", "not_found"]


def test_casts(tmp_path: Path) -> None:
    """Codes 0 1 2 3 (`e4` at two bits), a quarter of a unit in the last place apart, upon 1: DEC-1 and DEC-2."""
    put(tmp_path / "zarr.json", frame(RUN))
    w, ulps = Writer(tmp_path, 1, None), {"float64": 2**-23, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
    w.table("cast", "full", {dtype: (dtype, 4) for dtype in ulps}, rows=1)
    arrays: Json = {f"{dtype}.codes": of("uint8", [[0xE4]]) for dtype in ulps}
    arrays |= {f"{dtype}.qparams": of("float32", [[ulp / 4, 1]]) for dtype, ulp in ulps.items()}
    w.block(1, [held(dtype, None, 4, 2) for dtype in ulps], arrays, [0, 0, 1, 0, 1, *[0] * 6])
    w.table("codes", "full", dict.fromkeys(map("b{}".format, range(1, 9)), ("float32", 13)), rows=1)
    codes = {bits: np.random.default_rng(bits).integers(0, 2**bits, 13) for bits in range(1, 9)}
    streams = {bits: sum(int(code) << bits * j for j, code in enumerate(row)) for bits, row in codes.items()}
    packed = {bits: stream.to_bytes(-(-13 * bits // 8), "little") for bits, stream in streams.items()}
    arrays = {f"b{bits}.codes": np.frombuffer(row, np.uint8)[None] for bits, row in packed.items()}
    arrays |= {f"b{bits}.qparams": of("float16", [[1, 0]]) for bits in codes}
    w.block(1, [held(f"b{bits}", None, 13, bits) for bits in codes], arrays, [1, 0, 1, 0, 1, *[0] * 10])
    c = reader.Checkpoint(w.done().run, 1)
    assert all(same(values, [[1, 1, 1, 1 + ulps[dtype]]], dtype) for dtype, values in c.table("cast").items())
    assert all(same(c.table("codes")[f"b{bits}"], [row], "float32") for bits, row in codes.items())


def test_script(run: Path) -> None:
    command = [sys.executable, reader.__file__, str(run), "2"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    keys, values = of("uint64", [TOP, 7, 9, 12]), of("int16", [-20, 77, 90, 120])
    digests = {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in (("", keys), ("v", values))}
    assert json.loads(lines[1]) == {"name": "users", "rows": 4, "fields": digests}


SHOWN = re.compile(r"^(?:checkpoint (\d): |  ([\w.]+) +(\w+) +\[([\d,]+)\] +(\S+) (.+)$)", re.MULTILINE)


def test_worked_example(tmp_path: Path) -> None:
    """Section 14: the arrays are read off the page, and the bytes of their chunks are those of the page."""
    page, shown = (Path(__file__).parents[2] / "FORMAT.md").read_text("utf-8"), dict[int, list[tuple[str, ...]]]()
    for n, *line in SHOWN.findall(page):
        shown |= {int(n): []} if n else {}
        [*shown.values()][-1].extend([] if n else [tuple(line)])
    put(tmp_path / "zarr.json", frame(RUN))
    for n, rows, part in [(1, 4, [0, 0, 4, 0, 1]), (2, 5, [0, 0, 3, -1, 1]), (3, 5, [0, 0, 1, -1, 1])]:
        w, arrays = Writer(tmp_path, n, n - 1 or None), dict[str, Any]()
        w.table("user", "full" if n == 1 else "changed", {"weight": ("float32", 3), "sum": ("float32", None)}, rows)
        for name, dtype, shape, payload, rest in shown[n]:
            raw = of(dtype, json.loads(rest)).tobytes() if payload == "(zstd)" else bytes.fromhex(payload)
            values = np.frombuffer(raw, dtype).reshape([int(size) for size in shape.split(",")])
            arrays[name] = (values, None, "zstd" if payload == "(zstd)" else None)
        w.block(part[2], [held("weight", None, 3, 4), held("sum", "float32")], arrays, [*part, 0, 0, 0, 0])
        for name, _, shape, payload, rest in shown[n]:
            chunk = w.done().folder / "block-0-0" / name / ("c/0/0" if "," in shape else "c/0")
            assert payload == "(zstd)" or chunk.read_bytes().hex() == payload + rest
    user = reader.Checkpoint(tmp_path, 3).table("user")
    assert same(user["weight"], [[0, 5, 15], [0, 16, 30], [1, 1, 1], [0, 0, 60], [-15, 0, 0]], "float32")
    assert same(user["sum"], [1, 20, 3, 400, 5], "float32")
    assert changes(tmp_path, 1, 3)[0]["user"][0].tolist() == [1, 3, 4]


CHANGES: list[tuple[int, int, list[int], list[int], list[int], list[str]]] = [
    # from, to: changed rows of emb; changed keys of users, deleted keys of users; dropped tables
    (1, 2, [4, 5], [7, 12], [3], []),
    (2, 3, [0, 1, 2, 3, 4], [3, 7], [12], []),  # emb has other `rows` on the way back: changed in every row
    (3, 4, [0], [], [], []),
    (4, 5, [0, 1, 2, 3, 4, 5], [7, 12], [3], ["brief"]),  # 5 brings 4 and 3; 3 brings 2
    (5, 6, [], [-5, 8], [], ["users"]),  # users is another table
    (3, 6, [0, 1, 2, 3, 4, 5], [-5, 8], [], ["brief", "users"]),
]


def test_changes(run: Path) -> None:
    for p, c, rows, keys, deleted, dropped in CHANGES:
        touched, gone = changes(run, p, c)
        found = [one.tolist() for name in ("emb", "users") for one in touched[name]]
        assert (found, gone) == ([rows, [], keys, deleted], dropped), (p, c)
        assert [one.dtype for one in touched["users"]] == ["int64" if c == 6 else "uint64"] * 2
    for n, r in ((3, 1), (5, 2)):  # a rollback brings back every value
        assert [entry[1:] for entry in everything(run, n)[:4]] == [entry[1:] for entry in everything(run, r)[:4]]


def test_history(run: Path) -> None:
    """HEA-2: without an origin, `dropped` names all tables. CHG-2: those of c are others, changed in every row."""
    alter(run, increment, "manifest dropped", ["emb", "users"])
    touched, dropped = changes(run, 1, 2)
    assert [touched[name][0].tolist() for name in ("emb", "users")] == [[0, 1, 2, 3, 4, 5], [TOP, 7, 9, 12]]
    assert dropped == ["emb", "users"]
    put(run / "00000003/zarr.json", frame(PRUNED | {"sequence": 3}))
    assert kind(reader.Checkpoint(run, 4).table, "emb") == "pruned"
    for p, c in ((2, 4), (4, 5), (6, 5)):  # the rollback 5 to 2 crosses 3; 6 is not below 5
        assert kind(changes, run, p, c) == "history_pruned"
    assert changes(run, 5, 6)[1] == ["users"]


OTHERS: list[Json] = [{"other": 1}, {"attributes": {"other": 1}}, {"attributes": {"checkrun": PRUNED}}]
FRAMES = [PRUNED | change for change in ({"sequence": 8}, {"format_version": "0.09"}, {"kind": "checkpoint"})]
STATES: dict[str, list[bytes | Json]] = {
    "burnt": [b"", GROUP, GROUP | {"attributes": {}, "consolidated_metadata": None}],
    "damaged": [b'{"zarr_format": 3', *(GROUP | other for other in OTHERS), *map(frame, FRAMES)],
    "pruned": [frame(PRUNED)],
    "committed": [frame(PRUNED | {"kind": "checkpoint", "format_version": "0.10"})],
}


def test_states(run: Path) -> None:
    """COM-2, COM-5, TRE-1."""
    (run / "00000008").mkdir()
    for litter in ("0000009/zarr.json", "0000000009/zarr.json", "00000000/zarr.json", "9007199254740992/zarr.json"):
        put(run / litter, b"litter")
    for state, document in [(state, document) for state, documents in STATES.items() for document in documents]:
        put(run / "00000007/zarr.json", document)
        assert reader.sequences(run) == dict.fromkeys(range(1, 7), "committed") | {7: state}
        assert kind(reader.Checkpoint, run, 7) == {"committed": "unsupported_version"}.get(state, state)
        if state == "damaged":
            with pytest.raises(FormatError, match=r"damaged: .*00000007/zarr\.json: "):
                reader.latest(run)
        else:
            assert reader.latest(run) == (7 if state == "committed" else 6)
    put(run / "123456789/zarr.json", b"")
    assert reader.sequences(run)[123456789] == "burnt"
    assert kind(reader.Checkpoint, run, 8) == "checkpoint_not_found"
    assert kind(reader.latest, run / "none") == "run_not_found"
    for document in (b"", GROUP | OTHERS[1], frame(RUN | {"requires": ["x"]}), frame(RUN | {"format_version": "1.0"})):
        put(run / "zarr.json", document)
        assert kind(reader.latest, run) in ("not_a_run", "unsupported_feature", "unsupported_version")


def test_missing_and_flipped(run: Path) -> None:
    """Without any object of an attempt, or with a flipped bit in it, reading fails and names it."""
    commit = reader.Checkpoint(run, 2).commit
    for path in sorted(path for path in run.glob("0000000[12]/*/**/*") if path.is_file()):
        data = path.read_bytes()
        path.unlink()
        for i in (len(data) // 2, len(data) - 1):
            if "rows_first" not in path.parts:  # of which this reader makes no use (CHK-3)
                with pytest.raises(FormatError) as caught:
                    everything(run, 1, 2)
                assert (caught.value.kind, caught.value.place) == ("damaged", str(path))
            path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        path.write_bytes(data)
    data = (run / "00000002/zarr.json").read_bytes()
    for i in range(len(data)):
        put(run / "00000002/zarr.json", data[:i] + bytes([data[i] ^ 1 << i % 7]) + data[i + 1 :])
        with suppress(FormatError):
            assert reader.Checkpoint(run, 2).commit == commit, i


def alter(run: Path, write: Callable[[Path], Writer], path: str, value: Any) -> None:
    """Writes a checkpoint anew with another value at a path, or without it (...), and with fitting digests."""
    w = write(run)
    *way, last = [int(key) if key.isdigit() else key for key in path.split()]
    found: Any = vars(w)
    for key in way:
        found = found[key]
    found[last] = array(w.folder / f"block-0-{way[2]}" / str(last), *value) if way[-1] == "arrays" else value
    if value is ...:
        del found[last]
    w.done()


BREAKS: list[tuple[Callable[[Path], Writer], str, Any, str]] = [
    (base, "manifest extra_blob", ..., "KeyError: 'extra_blob'"),
    (base, "manifest tables 0 rows", None, "RES-1"),
    (base, "manifest tensors 0 offset", 2, "TEN-2"),
    (base, "manifest tensors 0 shape", [-1], "TEN-2"),
    (base, "manifest tensors", 5, "TypeError"),
    (base, "parts parts 0 8", ..., "IndexError"),
    (base, "parts parts 0 3", 6, "an impossible part"),
    (base, "parts parts 0 2", -1, "no part"),
    (base, "parts blocks 0 fields 0 name", "../weight", "TRE-3"),
    (base, "parts blocks 0 fields 0 bits", 9, "instead of uint8"),
    (base, "parts blocks 0 arrays sum.values", (np.zeros(4, np.float32),), "instead of float32"),
    (base, "parts blocks 0 arrays weight.exact_index", ([5],), "BLK-5"),
    (base, "parts blocks 0 fields 1 dtype", "float64", "RAW-1"),
    (increment, "parts blocks 0 arrays rows", ([-1, 4, 5], 2), "PRT-3"),
    (increment, "parts blocks 2 arrays deleted", ([7, 3],), "PRT-3"),
    (increment, "parts parts 2 0", 0, "an impossible part"),  # tombstones of a dense table (PRT-3)
    (base, "manifest tables 1 storage", "changed", "no parent"),  # LAY-2
    (rollback, "manifest tables 0 fields 1 dtype", "float64", "LAY-2"),
    (rollback, "manifest tables 0 rows", 6, "LAY-3"),
    (branch, "parts parts 1 8", 1, "LAY-4"),
    (increment, "manifest tables 0 rows", 8, "RES-1"),
    (base, "manifest tables 0 requires", ["column_group_qparams"], "unsupported_feature"),
    (base, "manifest tables 0 addressing", "hashed", "unsupported_feature"),
    (base, "manifest tables 0 fields 1 dtype", "float128", "unsupported_feature"),
    (base, "parts blocks 0 fields 1 encoding", "codebook", "unsupported_feature"),
    (base, "parts blocks 0 arrays sum.values", (np.zeros(5, np.float32), 2, "lz4"), "unsupported_feature"),
]


def test_broken_rules(run: Path) -> None:
    """From the highest checkpoint down, so that what is below stays whole."""
    for write, path, value, problem in sorted(BREAKS, key=lambda case: -CHECKPOINTS.index(case[0])):
        alter(run, write, path, value)
        with pytest.raises(FormatError) as caught:
            everything(run, CHECKPOINTS.index(write) + 1)
        assert problem in str(caught.value), (path, value)
        assert problem != "unsupported_feature" or reader.Checkpoint(run, 1).table("users")  # TAB-1


def test_commits(run: Path) -> None:
    """COM-2: a commit without a key of 5.2, or with another type or order, is damaged; other keys are ignored."""
    whole = reader.Checkpoint(run, 6).commit
    wrong: list[Json] = [{key: ...} for key in whole] + [{key: True} for key in whole] + [{"pad": "-" * 8192}]
    wrong += [{"step": -1}, {"restores": None}, {"requires": [1]}, {"attempt": "0" * 15}, {"policy": {"name": ""}}]
    wrong += [{"manifest": whole["manifest"] | {"sha256": "0" * 63}}, {"parent": 0}, {"predecessor": 6}]
    wrong += [{"parent": 6}, {"predecessor": 4}, {"rollback_to": 6}, {"predecessor": None}]
    for change in wrong:
        commit = {key: value for key, value in (whole | change).items() if value is not ...}
        put(run / "00000006/zarr.json", frame(commit))
        assert reader.sequences(run)[6] == "damaged", change
        assert kind(reader.Checkpoint, run, 6) == "damaged", change
    put(run / "00000006/zarr.json", frame(whole | {"unknown": 1}))
    assert reader.sequences(run)[6] == "committed"
    assert kind(reader.Checkpoint, run, 6) == "damaged"  # MAN-1: the manifest repeats the unknown key too


def test_strangers(run: Path) -> None:
    """Another parent, another predecessor (MAN-2); none at all."""
    alter(run, base, "manifest extra", "other")
    assert same(reader.Checkpoint(run, 1).table("emb")["sum"], [0.5, 1.5, 2.5, -0.0, 4.5], "float32")
    with pytest.raises(FormatError, match="MAN-2"):
        reader.Checkpoint(run, 2).table("emb")
    alter(run, branch, "manifest extra", "other")
    with pytest.raises(FormatError, match="MAN-2"):
        changes(run, 4, 6)
    (run / "00000001/zarr.json").write_bytes(b"")
    assert [kind(reader.Checkpoint, run, 1), kind(reader.Checkpoint(run, 2).table, "emb")] == ["burnt", "damaged"]


def test_it_is_short() -> None:
    """What a reader needs fits in 300 lines."""
    assert len(Path(reader.__file__).read_text().splitlines()) < 300
