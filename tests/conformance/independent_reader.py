"""A second reader of the checkrun format 0.9, written from FORMAT.md alone; it prefers shortness to speed.

It checks what CHK-1 asks of every reader, and leaves to audits what CHK-2 leaves to them.
As a script, `independent_reader.py RUN [SEQUENCE]` prints a line of JSON per table, with digests of its values.
"""

import gzip
import hashlib
import json
import re
import sys
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import blosc2
import google_crc32c
import ml_dtypes
import numpy as np
import zstandard

Array = np.ndarray[Any, Any]
Json = dict[str, Any]
NO_ROWS: Array = np.zeros(0, np.int64)
VERSION, CONVENTION = "0.9", "d5df0d53-d446-49ad-a4cd-95a3e6d6a63f"
CASTABLE = ("float16", "bfloat16", "float32", "float64")  # what codes may decode to (DEC-2)
DTYPES = """int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128
bool:uint8 bfloat16:uint16 float8_e4m3fn:uint8 float8_e5m2:uint8 float8_e4m3fnuz:uint8 float8_e5m2fnuz:uint8
float8_e8m0fnu:uint8"""  # logical:stored, where these differ
STORED = {pair.split(":")[0]: pair.split(":")[-1] for pair in DTYPES.split()}
LOGICAL = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in STORED}

# What documents look like (section 5): {required key: value}, [every item], (one, or another), a range of integers, a
# regular expression of texts, None for null, ... for anything.
TEXT, DIGEST, INTEGER, POSITIVE = r"[\s\S]*", "[0-9a-f]{64}", range(2**63), range(1, 2**63)
FILE, SLICE = {"bytes": INTEGER, "sha256": DIGEST}, {"writer": INTEGER, "offset": INTEGER}
GROUP: Json = {"zarr_format": range(3, 4), "node_type": "group"}
FRAME = {"zarr_conventions": [...], "checkrun": {"kind": TEXT, "format_version": r"(0|[1-9]\d*)\.(0|[1-9]\d*)"}}
COMMIT: Json = {"requires": [TEXT], "step": (INTEGER, None), "created": TEXT, "attempt": "[0-9a-f]{16,64}"}
COMMIT |= {"parent": (POSITIVE, None), "predecessor": (POSITIVE, None), "rollback_to": (POSITIVE, None)}
COMMIT |= {"restores": INTEGER, "stored_bytes": INTEGER, "manifest": FILE, "policy": {"name": TEXT, "reason": TEXT}}
FIELD: Json = {"name": "[a-z][a-z0-9_]{0,63}", "columns": (POSITIVE, None)}
TABLE: Json = {"name": TEXT, "requires": [TEXT], "addressing": TEXT, "key_dtype": (TEXT, None), "storage": TEXT}
TABLE |= {"rows": (INTEGER, None), "fields": [FIELD | {"dtype": TEXT, "encoder": ({}, None)}]}
TENSOR: Json = {"name": TEXT, "dtype": TEXT, "shape": [INTEGER]} | SLICE
MANIFEST: Json = {"commit": {}, "parent_sha256": (DIGEST, None), "predecessor_sha256": (DIGEST, None), "extra": ...}
MANIFEST |= {"writers": [FILE], "tables": [TABLE], "dropped": [TEXT], "tensors": [TENSOR]}
MANIFEST |= {"blobs": [{"name": TEXT, "bytes": INTEGER} | SLICE], "extra_blob": ({"bytes": INTEGER} | SLICE, None)}
ARRAY: Json = {"dtype": TEXT, "shape": [POSITIVE], "chunk_rows": POSITIVE, "compression": (TEXT, None)}
STORED_FIELD: Json = FIELD | {"encoding": TEXT, "bits": (INTEGER, None), "dtype": (TEXT, None)}
PART_FILE: Json = {"writer": INTEGER, "attempt": TEXT, "tables": [TEXT], "parts": [[range(-1, 2**63)]], "dense": {}}
PART_FILE |= {"blocks": [{"rows": INTEGER, "fields": [STORED_FIELD], "arrays": {}}]}
# What this version knows of tables (TAB-1), and how the two kinds of them differ.
KNOWN: Json = {"addressing": "dense|keyed", "key_dtype": ("u?int64", None), "storage": "full|changed|unchanged"}
KNOWN |= {"fields": [{"dtype": "|".join(STORED)}]}
DENSE: Json = {"addressing": "dense", "key_dtype": None, "rows": INTEGER}
KEYED: Json = {"addressing": "keyed", "key_dtype": TEXT, "rows": None}


class FormatError(Exception):
    """What is wrong (`kind` is one of section 10), and in which place."""

    def __init__(self, kind: str, place: object, problem: str) -> None:
        super().__init__(f"{kind}: {place}: {problem}")
        self.kind, self.place, self.problem = kind, str(place), problem


def must(condition: object, place: object, problem: str, kind: str = "damaged") -> None:
    """Raise the error unless the condition holds."""
    if not condition:
        raise FormatError(kind, place, problem)


def sound(place: object, call: Any, *arguments: Any, **options: Any) -> Any:
    """The result of reading or decoding an object; whatever is raised there is damage of that object."""
    try:
        return call(*arguments, **options)
    except Exception as error:
        raise FormatError("damaged", place, f"{type(error).__name__}: {error}") from error


def fits(value: Any, like: Any) -> bool:
    """Whether a JSON value looks like this."""
    if isinstance(like, dict) and isinstance(value, dict):
        return all(key in value and fits(value[key], like[key]) for key in like)
    if isinstance(like, list) and isinstance(value, list):
        return all(fits(item, like[0]) for item in value)
    if isinstance(like, str) and isinstance(value, str):
        return re.fullmatch(like, value) is not None
    if isinstance(like, tuple):
        return any(fits(value, one) for one in like)
    return like is ... or like is value is None or (isinstance(like, range) and type(value) is int and value in like)


def conform(value: Any, like: Json, place: object) -> Any:
    """The document, once it is known to have every key as specified (DOC-1, DOC-2)."""
    wrong = [key for key in like if not fits(value, {key: like[key]})]
    must(not wrong, place, f"absent or not as specified: {', '.join(wrong)}")
    return value


def named(entries: list[Any], place: object) -> dict[str, Any]:
    """Entries by their names, which are unique."""
    must(len({entry["name"] for entry in entries}) == len(entries), place, "one name twice")
    return {entry["name"]: entry for entry in entries}


def read_json(place: Path, told: Any = None) -> Any:
    """A document; where its size and SHA-256 are told, the one that was meant (MAN-1)."""
    data = sound(place, place.read_bytes)
    facts = len(data), hashlib.sha256(data).hexdigest()
    must(told is None or facts == (told["bytes"], told["sha256"]), place, "another size or SHA-256 (MAN-1)")
    text = sound(place, gzip.decompress, data) if place.suffix == ".gz" else data
    return sound(place, json.loads, text, parse_constant=int)  # int("NaN") fails, as it must


def framed(place: Path, foreign: str = "damaged") -> Any:
    """The `checkrun` object of a zarr.json (DOC-3); None in an empty object or a bare Zarr group (COM-2, RUN-1)."""
    zarr = read_json(place) if place.stat().st_size else {"zarr_format": 3, "node_type": "group"}
    attributes = conform(zarr, GROUP, place).get("attributes", {})
    if not fits(attributes, {"checkrun": ...}):
        bare = attributes == {} and zarr.keys() <= {*GROUP, "consolidated_metadata", "attributes"}
        must(bare, place, "a Zarr group without a document of this format", foreign)
        return None
    conventions = conform(attributes, FRAME, place)["zarr_conventions"]
    must(any(fits(one, {"uuid": CONVENTION}) for one in conventions), place, "not of this convention (DOC-3)")
    return attributes["checkrun"]


def understand(document: Any, place: object) -> None:
    """Refuse a document of another version, or that requires a feature (VER-1, VER-2)."""
    must(document["format_version"] == VERSION, place, document["format_version"], "unsupported_version")
    must(not document["requires"], place, f"requires {document['requires']}", "unsupported_feature")


def open_run(path: str | Path) -> Path:
    """The folder of a run that has a run document (RUN-1)."""
    run, place = Path(path), Path(path, "zarr.json")
    must(place.exists(), place, "no run document", "not_a_run" if run.exists() else "run_not_found")
    document = framed(place, "not_a_run")
    must(fits(document, {"kind": "run"}), place, "no run document", "not_a_run")
    understand(conform(document, {"requires": [TEXT]}, place), place)
    return run


def read_commit(run: Path, n: int) -> Any:
    """The commit of number n, or an error whose kind tells what stands there instead (COM-2)."""
    place = run / f"{n:08d}" / "zarr.json"
    must(place.exists(), place, "no such number", "checkpoint_not_found")
    commit = framed(place)
    must(commit is not None, place, "no commit", "burnt")
    conform(commit, {"kind": "checkpoint|pruned", "sequence": range(n, n + 1)}, place)
    must(commit["kind"] == "checkpoint", place, "its data is gone", "pruned")
    if commit["format_version"] == VERSION:
        conform(commit, COMMIT, place)
        parent, predecessor, back = (commit[key] or 0 for key in ("parent", "predecessor", "rollback_to"))
        must(n > predecessor >= parent and n > back, place, "numbers in disorder (COM-6)")
    return commit


def sequences(run_path: str | Path) -> dict[int, str]:
    """Every occupied number, ascending, and whether it is committed, pruned, burnt or damaged."""
    run, states = open_run(run_path), {}
    names = [child.name for child in run.iterdir() if re.fullmatch("[0-9]{8}|[1-9][0-9]{8,15}", child.name)]
    for n in sorted(n for n in map(int, names) if 0 < n < 2**53):
        try:
            states[n] = "committed" if read_commit(run, n) else ""
        except FormatError as error:
            states[n] = error.kind
    return {n: state for n, state in states.items() if state != "checkpoint_not_found"}


def latest(run_path: str | Path) -> int | None:
    """The highest committed number (HEA-5); a damaged one above it is an error (COM-5)."""
    numbers = [n for n, state in sequences(run_path).items() if state in ("committed", "damaged")]
    return numbers[-1] if numbers and read_commit(Path(run_path), numbers[-1]) else None


def read_array(place: Path, entry: Any, dtypes: str, *shape: int) -> Array:
    """A whole array, as its entry in the part file tells, once this is of the right kind (ZAR-2 to ZAR-5, BLK-1)."""
    conform(entry, ARRAY, place)
    must(entry["dtype"] in dtypes.split() and entry["shape"] == [*shape], place, f"not {dtypes} {shape}")
    must(entry["compression"] in (None, "zstd", "blosc"), place, "unknown compression", "unsupported_feature")
    dtype, step, width = np.dtype(entry["dtype"]).newbyteorder("<"), entry["chunk_rows"], shape[1:]
    size, whole = step * prod(width) * dtype.itemsize, bytearray()
    for chunk in [place / f"c/{i}{'/0' * len(width)}" for i in range(-(-shape[0] // step))]:
        stored = sound(chunk, chunk.read_bytes)
        data, checksum = stored[:-4], stored[-4:]
        must(google_crc32c.value(data).to_bytes(4, "little") == checksum, chunk, "wrong CRC-32C")
        if entry["compression"] == "zstd":
            data = sound(chunk, zstandard.ZstdDecompressor().decompress, data, max_output_size=size)
        elif entry["compression"] == "blosc":
            data = sound(chunk, blosc2.decompress, data)
        must(len(data) == size, chunk, f"{len(data)} bytes instead of {size}")
        whole += data
    return np.frombuffer(whole, dtype).reshape(-1, *width)[: shape[0]]


def unpack(packed: Array, columns: int, bits: int) -> Array:
    """Rows of packed codes as (n, columns) integers (PCK-1)."""
    start = np.arange(columns) * bits
    padded = np.pad(packed, ((0, 0), (0, 1))).astype(np.uint16)
    pairs = padded[:, start // 8] | padded[:, start // 8 + 1] << 8
    codes: Array = pairs >> (start % 8).astype(np.uint16) & (2**bits - 1)
    return codes


class Block:
    """Arrays that are cut into parts of tables; `tables` are the entries of the parts' tables."""

    def __init__(self, folder: Path, entry: Any, parts: list[list[int]], tables: list[Any]) -> None:
        self.folder, self.n, self.arrays = folder, entry["rows"], entry["arrays"]
        self.fields, self.values = named(entry["fields"], folder), cache(self.decode)
        self.array = cache(lambda name, *kind: read_array(folder / name, self.arrays.get(name), *kind))
        numbers = sound(folder, lambda: np.array(parts, np.int64).reshape(len(parts), 8 + len(self.fields)))
        offset, count, first_row, recent, deleted_offset, deleted = numbers.T[2:8]
        listed, self.deleted = first_row < 0, int(deleted.sum())
        present = {"rows": any(listed) and self.n > 0, "recent": any(recent == 2), "deleted": any(deleted)}
        aligned = [name for name in self.arrays if name == "rows" or name.endswith((".codes", ".qparams", ".values"))]
        dtypes = [{field["name"]: field["dtype"] for field in table["fields"]} for table in tables]
        rules = {
            "5.5": np.all(np.delete(numbers, 4, axis=1) >= 0) and all(recent <= 2),
            "PRT-1 rows": np.array_equal(offset, np.cumsum(count) - count) and count.sum() == self.n,
            "PRT-1 deleted": np.array_equal(deleted_offset, np.cumsum(deleted) - deleted),
            "PRT-2 first_row": all(listed) or not any(listed),
            "PRT-2 count": all(count) or not (self.n or self.fields or any(recent) or any(~listed)),
            "PRT-2 arrays": all((name in self.arrays) == there for name, there in present.items()),
            "PRT-2 unchanged": all(table["storage"] != "unchanged" for table in tables),
            "PRT-4 fields": all(name in one and one[name] == dtypes[0][name] for one in dtypes for name in self.fields),
            "BLK-2": len({conform(self.arrays[name], ARRAY, folder)["chunk_rows"] for name in aligned}) <= 1,
        }
        must(all(rules.values()), folder, f"breaks {[rule for rule in rules if not rules[rule]]}")

    def increasing(self, name: str, size: int, start: int, count: int) -> Array:
        """Some entries of `rows`, `deleted` or an `exact_index`."""
        found = self.array(name, "int64", size)[start : start + count] if count else NO_ROWS
        must(np.all(found[1:] > found[:-1]), self.folder / name, "does not increase (PRT-3, BLK-5)")
        return found

    def contents(self, part: list[int], table: Any) -> tuple[Array, Array, Array]:
        """The rows or keys of a part, the recent ones of them, and its tombstones (PRT-2, PRT-3)."""
        offset, count, first_row, recent, deleted_offset, deleted = part[2:8]
        listed, keyed, bits = first_row < 0, table["addressing"] == "keyed", np.full(count, recent == 1)
        if recent == 2:
            octets = self.array("recent", "uint8", -(-self.n // 8))
            bits = np.unpackbits(octets, bitorder="little")[offset : offset + count] == 1
        rows = self.increasing("rows", self.n, offset, count) if listed else np.arange(first_row, first_row + count)
        possible = listed if keyed else not deleted and (not count or 0 <= rows[0] <= rows[-1] < table["rows"])
        must(possible, self.folder, f"rows or tombstones that {table['name']!r} cannot have (PRT-2, PRT-3)")
        tombstones = self.increasing("deleted", self.deleted, deleted_offset, deleted)
        return rows, rows[bits], tombstones

    def decode(self, name: str, dtype: str) -> Array:
        """A field of all rows of the block, of this logical dtype (7.2, 7.3)."""
        field, place = self.fields[name], self.folder / name
        bits, width = field["bits"], () if field["columns"] is None else (field["columns"],)
        if field["encoding"] == "affine":
            right = width and field["dtype"] is None and bits in range(1, 9) and dtype in CASTABLE
            must(right, place, "no affine field (5.5, PRT-4)")
            packed = self.array(f"{name}.codes", "uint8", self.n, -(-prod(width) * bits // 8))
            qparams = self.array(f"{name}.qparams", "float16 float32", self.n, 2).astype(np.float32)
            with np.errstate(all="ignore"):
                products = unpack(packed, prod(width), bits).astype(np.float32) * qparams[:, :1]
                values = (products + qparams[:, 1:]).astype(LOGICAL[dtype])
        else:
            known = field["encoding"] == "raw" and field["dtype"] in STORED
            must(known, place, f"encoding {field['encoding']} {field['dtype']}", "unsupported_feature")
            narrowed = dtype == "float32" and field["dtype"] in ("float16", "bfloat16")
            must(bits is None and (narrowed or field["dtype"] == dtype), place, "no raw field (5.5, RAW-1)")
            values = self.array(f"{name}.values", STORED[field["dtype"]], self.n, *width)
            values = values.view(LOGICAL[field["dtype"]]).astype(LOGICAL[dtype])
        if f"{name}.exact_index" in self.arrays:
            m = conform(self.arrays[f"{name}.exact_index"], ARRAY, place)["shape"][0]
            index = self.increasing(f"{name}.exact_index", m, 0, m)
            must(index[0] >= 0 and index[-1] < self.n, place, "exact rows outside the block (BLK-5)")
            values[index] = self.array(f"{name}.exact_values", STORED[dtype], m, *width).view(LOGICAL[dtype])
        return values

    def columns(self, part: list[int], field: Any) -> Any:
        """The columns of a field of its table that a part holds (PRT-4)."""
        start, width = part[8 + [*self.fields].index(field["name"])], self.fields[field["name"]]["columns"]
        within = (width is None) == (field["columns"] is None) and start + (width or 0) <= (field["columns"] or 0)
        must(within, self.folder / field["name"], "columns that the field has not (PRT-4)")
        return (slice(start, start + width),) if width else ()


def identity(table: Any) -> Any:
    """What a table has in common with what it is laid over, other than rows (LAY-2)."""
    fields = {(field["name"], field["dtype"], field["columns"]) for field in table["fields"]}
    return table["addressing"], table["key_dtype"], fields


class Checkpoint:
    """A committed checkpoint: its commit, manifest and part files, and what they lead to."""

    def __init__(self, run_path: str | Path, n: int) -> None:
        self.run, self.n = open_run(run_path), n
        self.commit = read_commit(self.run, n)
        understand(self.commit, self.run / f"{n:08d}")
        self.folder = self.run / f"{n:08d}" / self.commit["attempt"]
        self.place = place = self.folder / "manifest.json"
        self.manifest = manifest = conform(read_json(place, self.commit["manifest"]), MANIFEST, place)
        told = {key: value for key, value in self.commit.items() if key != "manifest"}
        same = json.dumps(told, sort_keys=True) == json.dumps(manifest["commit"], sort_keys=True)
        must(same, place, "another commit (MAN-1)")
        self._tables, self._tensors, self._blobs = (named(manifest[k], place) for k in ("tables", "tensors", "blobs"))
        self.parts: dict[str, list[tuple[Block, list[int]]]] = {name: [] for name in self._tables}
        self.dense: dict[tuple[int, str], Any] = {}
        for w, told in enumerate(manifest["writers"]):
            self.read_part_file(w, told)

    def read_part_file(self, w: int, told: Any) -> None:
        """Read the part file of a writer and deal its parts out to their tables (PRT-1)."""
        place = self.folder / f"parts-{w}.json.gz"
        file = conform(read_json(place, told), PART_FILE, place)
        must((file["writer"], file["attempt"]) == (w, self.commit["attempt"]), place, "of another attempt (PRT-1)")
        must(self._tables.keys() >= {*file["tables"]}, place, "a table that the manifest does not name (PRT-1)")
        tables, blocks = [self._tables[name] for name in file["tables"]], range(len(file["blocks"]))
        known = all(len(part) >= 8 and 0 <= part[0] < len(tables) and part[1] in blocks for part in file["parts"])
        must(known, place, "a part of no table or no block (5.5)")
        for b in blocks:
            parts = [part for part in file["parts"] if part[1] == b]
            owners = [tables[part[0]] for part in parts]
            block = Block(self.folder / f"block-{w}-{b}", file["blocks"][b], parts, owners)
            for table, part in zip(owners, parts, strict=True):
                self.parts[table["name"]].append((block, part))
        self.dense |= {(w, name): entry for name, entry in file["dense"].items()}

    def below(self, which: str) -> "Checkpoint":
        """The parent or the predecessor (MAN-2)."""
        must(self.commit[which] is not None, self.place, f"no {which}")
        other, told = Checkpoint(self.run, self.commit[which]), self.manifest[f"{which}_sha256"]
        must(other.commit["manifest"]["sha256"] == told, other.place, f"not the {which} of {self.n} (MAN-2)")
        return other

    def entry(self, name: str, absent: str = "table_not_found") -> Any:
        """The entry of a table, once it is known to be readable (TAB-1)."""
        must(name in self._tables, self.place, f"no table {name!r}", absent)
        entry, place = self._tables[name], f"{self.place}: table {name!r}"
        must(fits(entry, KNOWN) and not entry["requires"], place, "needs another reader", "unsupported_feature")
        must(fits(entry, (DENSE, KEYED)) and named(entry["fields"], place), place, "key_dtype, rows or fields (5.4)")
        return entry

    def layers(self, name: str) -> list["Checkpoint"]:
        """The layers of a table, from here down to the first that holds it in full (9.3, step 1)."""
        layers, entry = [self], self.entry(name)
        while entry["storage"] != "full":
            layers.append(layers[-1].below("parent"))
            upper, entry, place = entry, layers[-1].entry(name, "damaged"), f"{layers[-2].place}: table {name!r}"
            must(identity(upper) == identity(entry), place, "not the table that the parent has (LAY-2)")
            grown = (upper["rows"] or 0) - (entry["rows"] or 0)
            must(grown == 0 or (grown > 0 and upper["storage"] == "changed"), place, "number of rows (LAY-3)")
        return layers

    def lay_over(self, name: str, below: dict[str, Array]) -> dict[str, Array]:
        """A table with its rows or keys, given what it is below this layer (LAY-4, LAY-5, RES-1)."""
        entry, place, old = self.entry(name), f"{self.place}: table {name!r}", below.get("", NO_ROWS)
        parts = [(block, part, *block.contents(part, entry)) for block, part in self.parts[name]]
        listed = np.unique(np.concatenate([NO_ROWS, *(rows for _, _, rows, _, _ in parts)]))
        kept = ~np.isin(old, np.concatenate([listed, *(deleted for *_, deleted in parts)]))
        laid = {"": (keys := np.union1d(old[kept], listed))}
        must(entry["rows"] in (None, len(keys)), place, f"{len(keys)} rows of {entry['rows']} (RES-1)")
        for field in entry["fields"]:
            name, width = field["name"], [field["columns"]] if field["columns"] else []
            laid[name] = filled = np.zeros([len(keys), *width], LOGICAL[field["dtype"]])
            times, at = np.zeros(filled.shape, np.int32), np.searchsorted(keys, old[kept])
            filled[at], times[at] = below[name][kept] if below else filled[at], 1
            for block, part, rows, _, _ in [one for one in parts if name in one[0].fields]:
                cells = (np.searchsorted(keys, rows), *block.columns(part, field))
                filled[cells] = block.values(name, field["dtype"])[part[2] : part[2] + part[3]]
                times[cells] += 1
            must(np.all(times == 1), place, f"{name} missing or twice in some row (LAY-4, RES-1)")
        return laid

    def tables(self) -> list[str]:
        """The names of the tables."""
        return [*self._tables]

    def table(self, name: str) -> dict[str, Array]:
        """The fields of a table (9.3) and, in a keyed one, under "" its keys, ascending as int64."""
        table: dict[str, Array] = {}
        for layer in reversed(self.layers(name)):
            table = layer.lay_over(name, table)
        keys, key_dtype = table.pop(""), self.entry(name)["key_dtype"]
        return {"": keys.view(key_dtype), **table} if key_dtype else table

    def tensors(self) -> list[str]:
        """The names of the tensors."""
        return [*self._tensors]

    def tensor(self, name: str) -> Array:
        """A dense tensor."""
        must(name in self._tensors, self.place, f"no tensor {name!r}", "not_found")
        entry, dtype = self._tensors[name], self._tensors[name]["dtype"]
        must(dtype in STORED, self.place, f"tensor {name!r}: dtype {dtype}", "unsupported_feature")
        return self.elements(entry, dtype, prod(entry["shape"])).view(LOGICAL[dtype]).reshape(entry["shape"])

    def blob(self, name: str) -> bytes:
        """The bytes of a blob."""
        must(name in self._blobs, self.place, f"no blob {name!r}", "not_found")
        return self.elements(self._blobs[name], "blob", self._blobs[name]["bytes"]).tobytes()

    def extra(self) -> Any:
        """The trainer's state."""
        at = self.manifest["extra_blob"]
        text = self.elements(at, "blob", at["bytes"]).tobytes() if at else b""
        return sound(self.place, json.loads, text) if at else self.manifest["extra"]

    def elements(self, entry: Any, array: str, count: int) -> Array:
        """Some elements of an array of `dense-<writer>`."""
        place, dtype = self.folder / f"dense-{entry['writer']}" / array, STORED.get(array, "uint8")
        if not count:
            return np.zeros(0, dtype)
        told = conform(self.dense.get((entry["writer"], array)), ARRAY, place)
        must(entry["offset"] + count <= told["shape"][0], place, "fewer elements than the manifest places there")
        return read_array(place, told, dtype, told["shape"][0])[entry["offset"] : entry["offset"] + count]


def way(first: Checkpoint, stop: int, states: dict[int, str]) -> list[Checkpoint]:
    """A checkpoint and those below it along `predecessor`, down to and excluding `stop` (CHG-1, CHG-3)."""
    met = [first]
    while (n := met[-1].commit["predecessor"]) != stop:
        must(states.get(n) in ("committed", "damaged"), met[-1].place, f"no way on to {stop}", "history_pruned")
        met.append(met[-1].below("predecessor"))
    return met


def changes(run_path: str | Path, p: int, c: int) -> tuple[dict[str, tuple[Array, Array]], list[str]]:
    """For each table of c the rows or keys changed since p and the keys deleted; and the tables dropped (9.4)."""
    last, states, answer = Checkpoint(run_path, c), sequences(run_path), {}
    todo, met = way(last, p, states) if p != c else [], dict[int, Checkpoint]()
    dropped, whole = set[str](), set[str]()
    while todo:
        if (at := todo.pop()).n in met:
            continue
        met[at.n], r = at, at.commit["rollback_to"]
        back = way(at, r, states)[1:] if r is not None else []
        todo += back
        dropped |= {*at.manifest["dropped"]} | (at._tables.keys() - last._tables.keys())
        for other in back:
            dropped |= other._tables.keys() - at._tables.keys()
            both = other._tables.keys() & at._tables.keys()
            whole |= {name for name in both if other._tables[name]["rows"] != at._tables[name]["rows"]}
    for name in last.tables():
        key_dtype = last.entry(name)["key_dtype"]
        keys = last.table(name)[""].view(np.int64) if key_dtype else np.arange(last.entry(name)["rows"])
        stored = [(at.entry(name), *one) for at in met.values() for one in at.parts.get(name, [])]
        contents = [block.contents(part, entry) for entry, block, part in stored]
        touched = np.unique(np.concatenate([NO_ROWS, *(some for _, *both in contents for some in both)]))
        changed = keys if name in whole | dropped else np.intersect1d(keys, touched)
        deleted = np.setdiff1d(touched, keys) if key_dtype and name not in whole | dropped else NO_ROWS
        answer[name] = changed.view(key_dtype or "int64"), deleted.view(key_dtype or "int64")
    return answer, sorted(dropped)


if __name__ == "__main__":
    checkpoint = Checkpoint(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else latest(sys.argv[1]) or 0)
    for table in checkpoint.tables():
        fields = checkpoint.table(table)
        digests = {key: hashlib.sha256(value.tobytes()).hexdigest() for key, value in fields.items()}
        line = {"name": table, "rows": len(next(iter(fields.values()))), "fields": digests}
        sys.stdout.write(json.dumps(line) + "\n")
