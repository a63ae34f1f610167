"""A small run, built by hand and byte by byte, from FORMAT.md alone, for the self-check of the independent reader.

Of its six checkpoints 1 is a base, 2 an increment, 3 a rollback to 1, 4 an increment over it, 5 a rollback to 2 (a base
across the rollback 3), and 6 an increment with another table `users`. The metadata of Zarr is left out: readers of this
format may do without it (CHK-3).
"""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zstandard
from numcodecs.blosc import Blosc

from tests.conformance import independent_reader as reader

Json = dict[str, Any]
Array = np.ndarray[Any, Any]
GROUP: Json = {"zarr_format": 3, "node_type": "group"}
PRUNED = {"kind": "pruned", "format_version": "0.9", "sequence": 7}
RUN = {"kind": "run", "format_version": "0.9", "requires": []}
TOP = 2**64 - 2  # as int64: -2, so that it is the first of the keys


def put(path: Path, data: bytes | Json) -> Json:
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def frame(checkrun: Json) -> Json:
    return GROUP | {
        "attributes": {"zarr_conventions": [{"uuid": "d5df0d53-d446-49ad-a4cd-95a3e6d6a63f"}], "checkrun": checkrun}
    }


def array(path: Path, values: Any, chunk_rows: int | None = None, compression: str | None = None) -> Json:
    values = np.asarray(values)
    step = chunk_rows or len(values)
    for i, start in enumerate(range(0, len(values), step)):
        chunk = np.zeros((step, *values.shape[1:]), values.dtype)
        chunk[: len(values) - start] = values[start : start + step]
        data = chunk.tobytes()
        if compression == "zstd":
            data = zstandard.ZstdCompressor(level=1).compress(data)
        elif compression == "blosc":
            data = bytes(Blosc(cname="zstd", clevel=5, shuffle=Blosc.SHUFFLE).encode(chunk))
        key = f"c/{i}" if values.ndim == 1 else f"c/{i}/0"
        put(path / key, data + google_crc32c.value(data).to_bytes(4, "little"))
    told = {"dtype": str(values.dtype), "shape": [*values.shape], "chunk_rows": step, "compression": compression}
    return told | {"unknown": "to be ignored"}  # DOC-1


def held(name: str, dtype: str | None, columns: int | None = None, bits: int | None = None) -> Json:
    """A field of a block: raw, or affine if there are bits."""
    return {"name": name, "encoding": "affine" if bits else "raw", "columns": columns, "bits": bits, "dtype": dtype}


class Writer:
    def __init__(self, run: Path, n: int, parent: int | None, **commit: Any) -> None:
        self.run, self.attempt = run, f"{n:032x}"
        self.folder = run / f"{n:08d}" / self.attempt
        self.commit = {"kind": "checkpoint", "format_version": "0.9", "requires": [], "sequence": n, "step": 10 * n}
        self.commit |= {"created": "2026-01-02T03:04:05Z", "attempt": self.attempt, "parent": parent}
        self.commit |= {"predecessor": n - 1 or None, "rollback_to": None, "restores": 0, "stored_bytes": 0}
        self.commit |= {"policy": {"name": "test", "reason": ""}} | commit
        self.parts: Json = {"writer": 0, "attempt": self.attempt, "tables": [], "blocks": [], "parts": [], "dense": {}}
        self.manifest: Json = {"tables": [], "dropped": [], "tensors": [], "blobs": [], "extra": 0, "extra_blob": None}

    def table(self, name: str, storage: str, fields: Json, rows: int | None = None, key: str | None = None) -> None:
        """A table entry; `fields` are {name: (dtype, columns)}."""
        entries = [{"name": f, "dtype": d, "columns": c, "encoder": None} for f, (d, c) in fields.items()]
        entry: Json = {"name": name, "requires": [], "addressing": "keyed" if key else "dense", "key_dtype": key}
        self.manifest["tables"].append(entry | {"rows": rows, "storage": storage, "fields": entries})
        self.parts["tables"] += [name] if storage != "unchanged" else []

    def block(self, rows: int, fields: list[Json], arrays: Json, *parts: list[int]) -> None:
        """A block: {name of array: values, or arguments of array()}; parts lack the index of the block."""
        b = len(self.parts["blocks"])
        told = {name: given if isinstance(given, tuple) else (given,) for name, given in arrays.items()}
        entries = {name: array(self.folder / f"block-0-{b}" / name, *given) for name, given in told.items()}
        self.parts["blocks"].append({"rows": rows, "fields": [{**field} for field in fields], "arrays": entries})
        self.parts["parts"] += [[part[0], b, *part[1:]] for part in parts]

    def done(self) -> "Writer":
        told = put(self.folder / "parts-0.json.gz", gzip.compress(json.dumps(self.parts).encode(), mtime=0))
        head: Json = {"commit": self.commit, "writers": [told]}
        for which in ("parent", "predecessor"):
            place = self.run / f"{self.commit[which] or 0:08d}" / "zarr.json"
            other = json.loads(place.read_bytes())["attributes"]["checkrun"] if self.commit[which] else None
            head[f"{which}_sha256"] = other and other["manifest"]["sha256"]
        told = put(self.folder / "manifest.json", head | self.manifest)
        put(self.folder.parent / "zarr.json", frame(self.commit | {"manifest": told}))
        return self


# --- The run. Field "weight" has 5 columns; the codes `d5 11` are 5 2 7 0 1, as section 7.1 writes them out.

EMB, USERS = {"weight": ("float32", 5), "sum": ("float32", None)}, {"v": ("int16", None)}
EMB_FIELDS = [held("weight", None, 5, 3), held("sum", "float32")]
CODES, EXACT, OTHER = [0xD5, 0x11], [0, 0], [0x88, 0x46]  # 0x4688 is 0 1 2 3 4 at three bits
ROW_0 = [1.5, 0.0, 2.5, -1.0, -0.5]  # 5 2 7 0 1 times 0.5 minus 1
ROW_1 = [10.0, 12.0, 14.0, 16.0, 18.0]  # 0 1 2 3 4 times 2 plus 10
ROW_2 = np.array([1 << 31, 0x7FC12345, 0x7F800000, 1, 0], np.uint32).view(np.float32)  # exact: -0, NaN, inf, 1e-45, 0
ROW_4 = [3.0, 3.0 + 2**-24, 3.0 + 2**-23, 3.0 + 3 * 2**-24, 3.0 + 2**-22]  # subnormal scale 2^-24, rounded to float32


def of(dtype: str, values: Any) -> Array:
    return np.array(values, dtype)


def users(w: Writer, storage: str, keys: list[int], values: list[int], recent: int, step: int) -> None:
    w.table("users", storage, USERS, key="uint64")
    arrays = {"rows": (keys, step, "zstd"), "rows_first": keys[::step], "v.values": (of("int16", values), step)}
    w.block(len(keys), [held("v", "int16")], arrays, [1, 0, len(keys), -1, recent, 0, 0, 0])


def base(run: Path) -> Writer:
    w = Writer(run, 1, None)
    w.table("emb", "full", EMB, rows=5)
    qparams = of("float16", [[0.5, -1], [2, 10], [np.nan, np.nan], [0, 7], [2**-24, 3]])
    arrays: Json = {"weight.codes": (of("uint8", [CODES, OTHER, EXACT, CODES, OTHER]), 2, "zstd")}
    arrays |= {"weight.qparams": (qparams, 2), "weight.exact_index": [2], "weight.exact_values": ROW_2[None]}
    arrays |= {"sum.values": (of("float32", [0.5, 1.5, 2.5, -0.0, 4.5]), 2)}
    w.block(5, EMB_FIELDS, arrays, [0, 0, 5, 0, 1, 0, 0, 0, 0])
    users(w, "full", [-2, 3, 7, 9], [-20, 30, 70, 90], 1, 4)
    tensors = [
        ("w", "float32", [2, 3], 1),
        ("s", "float32", [], 0),
        ("h", "bfloat16", [3], 0),
        ("none", "bool", [0, 4], 0),
    ]
    keys = ("name", "dtype", "shape", "offset")
    w.manifest["tensors"] = [dict(zip(keys, tensor, strict=True)) | {"writer": 0} for tensor in tensors]
    w.manifest["blobs"] = [{"name": "rng", "writer": 0, "offset": 2, "bytes": 3}]
    w.manifest["extra_blob"] = {"writer": 0, "offset": 5, "bytes": 9}
    blob = np.frombuffer(b'..abc{"lr": 1}', np.uint8)
    dense = {"float32": of("float32", range(7)), "bfloat16": of("uint16", [0x3F80, 0xC000, 0x7FC1]), "blob": blob}
    w.parts["dense"] = {name: array(w.folder / "dense-0" / name, values) for name, values in dense.items()}
    return w.done()


def increment(run: Path) -> Writer:
    """Rows 1 (repeated, not recent), 4 and 5 (new) of emb; of users, 3 is deleted, 7 deleted and listed, 12 new."""
    w = Writer(run, 2, 1)
    w.table("emb", "changed", EMB, rows=6)
    arrays: Json = {"rows": ([1, 4, 5], 2, "blosc"), "rows_first": [1, 5], "recent": of("uint8", [0b110])}
    arrays |= {"weight.codes": (of("uint8", [OTHER, CODES, EXACT]), 2), "sum.values": (of("float32", [1.5, -4, -5]), 2)}
    arrays |= {"weight.qparams": (of("float32", [[2, 10], [0.5, -1], [np.nan, np.nan]]), 2)}
    arrays |= {"weight.exact_index": [2], "weight.exact_values": ROW_2[None, ::-1]}
    w.block(3, EMB_FIELDS, arrays, [0, 0, 3, -1, 2, 0, 0, 0, 0])
    users(w, "changed", [7, 12], [77, 120], 1, 2)
    w.block(0, [], {"deleted": [3, 7]}, [1, 0, 0, -1, 0, 0, 2])
    return w.done()


def rollback(run: Path) -> Writer:
    w = Writer(run, 3, 1, rollback_to=1)
    w.table("emb", "unchanged", EMB, rows=5)
    w.table("users", "unchanged", USERS, key="uint64")
    return w.done()


def branch(run: Path) -> Writer:
    """Row 0 of emb in two parts, by columns, one of them narrowed to bfloat16; and a table that 5 will not have."""
    w = Writer(run, 4, 3)
    w.table("emb", "changed", EMB, rows=5)
    arrays: Json = {"weight.values": of("uint16", [[0x3F80, 0x7FC0]]), "sum.values": of("float32", [-1])}
    arrays |= {"weight.exact_index": [0], "weight.exact_values": of("float32", [[1.1, 2.2]])}
    w.block(1, [held("weight", "bfloat16", 2), held("sum", "float32")], arrays, [0, 0, 1, 0, 1, 0, 0, 0, 0])
    w.block(1, [held("weight", "float32", 3)], {"weight.values": of("float32", [[3, 4, 5]])}, [0, 0, 1, 0, 0, 0, 0, 2])
    w.table("users", "unchanged", USERS, key="uint64")
    w.table("brief", "full", {"x": ("bool", 2)}, rows=2)
    arrays = {"x.values": of("uint8", [[0, 1], [1, 1]])}
    w.block(2, [held("x", "bool", 2)], arrays, [1, 0, 1, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0])
    return w.done()


def second_rollback(run: Path) -> Writer:
    w = Writer(run, 5, None, rollback_to=2)
    w.manifest["dropped"] = ["brief"]
    w.table("emb", "full", EMB, rows=6)
    arrays = {f"{name}.values": values for name, values in reader.Checkpoint(run, 2).table("emb").items()}
    w.block(6, [held("weight", "float32", 5), held("sum", "float32")], arrays, [0, 0, 6, 0, 0, 0, 0, 0, 0])
    users(w, "full", [-2, 7, 9, 12], [-20, 77, 90, 120], 0, 3)
    return w.done()


def replacement(run: Path) -> Writer:
    w = Writer(run, 6, 5)
    w.manifest["dropped"] = ["users"]
    w.table("emb", "unchanged", EMB, rows=6)
    w.table("users", "full", {"v": ("uint8", None)}, key="int64")
    arrays = {"rows": [-5, 8], "rows_first": [-5], "v.values": of("uint8", [1, 2])}
    w.block(2, [held("v", "uint8")], arrays, [0, 0, 2, -1, 1, 0, 0, 0])
    return w.done()


CHECKPOINTS: list[Callable[[Path], Writer]] = [base, increment, rollback, branch, second_rollback, replacement]
