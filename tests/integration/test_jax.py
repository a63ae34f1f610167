"""jax gives and takes arrays. Each test is a process of its own: jax starts threads, and other tests fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BEGINNING = """
import sys
import warnings
warnings.simplefilter("error")
import jax
import jax.numpy as jnp
import numpy as np
import checkrun_format as crf
from checkrun_format.testing import MemoryStore

def bits_of(array):
    found = np.asarray(array)
    return found.dtype.name, found.shape, found.tobytes()

def refused(call, *told):
    try:
        call()
    except crf.InvalidInputError as error:
        assert all(text in str(error) for text in told), str(error)
    else:
        raise AssertionError(told)

rng = np.random.default_rng(0)
host = {
    "weight": rng.normal(size=(3000, 24)).astype(np.float32),
    "sum": rng.random(3000, np.float32),
    "half": rng.normal(size=(3000, 3)).astype(jnp.bfloat16),
    "seen": rng.random(3000) < 0.5,
    "tiny": rng.normal(size=(3000, 2)).astype(jnp.float8_e4m3fn),
    "count": rng.integers(0, 2**32, 3000, np.uint32),
}
host["weight"][7, 3] = np.nan
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program + "\nprint('through')", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.stdout) == ("", "through\n")


def test_arrays_of_jax_are_saved() -> None:
    """Of every dtype, with changed rows and keys as arrays of jax too; the bits are those of numpy's."""
    run("""
stores = [MemoryStore(), MemoryStore()]
for store, convert in zip(stores, (lambda a: a, jnp.asarray)):
    run = crf.open_run(store, "a", bits=4, policy="consecutive")
    tables = lambda fields, changed: {
        "dense": crf.Table({n: convert(v) for n, v in fields.items()}, changed=changed),
        "keyed": crf.Table({n: convert(v) for n, v in fields.items()}, keys=convert(np.arange(3000, dtype=np.int32)),
                           changed=changed),
    }
    run.save(crf.State(tables=tables(host, None), tensors={n: convert(v[:5]) for n, v in host.items()}))
    newer = {n: v.copy() for n, v in host.items()}
    newer["weight"][[1, 5]] = 9
    run.save(crf.State(tables=tables(newer, convert(np.array([5, 1])))))
wanted, found = (crf.open_run(store).load() for store in stores)
for name, table in wanted.tables.items():
    assert table.fields.keys() == host.keys()
    for field, values in table.fields.items():
        assert bits_of(values) == bits_of(found.tables[name][field]), field
first = crf.open_run(stores[1])[1].load()
assert all(bits_of(first.tensors[n]) == bits_of(v[:5]) for n, v in host.items())
assert crf.open_run(stores[1])[2].table("dense").stored_rows == 2
""")


@pytest.mark.parametrize("device", ["", "cpu"])
def test_arrays_of_jax_come_out(device: str) -> None:
    """Over torch where there is a device, from numpy's memory without; the same bits, and no copy."""
    run(
        """
device = sys.argv[1] or None
run = crf.open_run(MemoryStore(), "a", bits=4)
run.save(crf.State(tables={"t": crf.Table(host)}, tensors={n: v[:5] for n, v in host.items()}))
wanted, found = run.load(), run.load(framework="jax", device=device)
view = run.latest().table("t")
pairs = [(wanted.tables["t"][n], found.tables["t"][n]) for n in host]
pairs += [(wanted.tensors[n], found.tensors[n]) for n in host]
pairs += [(view.take([5, 1, 5])[n], view.take([5, 1, 5], framework="jax", device=device)[n]) for n in host]
pairs += [(view.read(slice(3, 9))[n], view.read(slice(3, 9), framework="jax", device=device)[n]) for n in host]
pairs += [(wanted.tensors["half"], run.latest().tensor("half", framework="jax", device=device))]
for numpys, jaxs in pairs:
    assert isinstance(jaxs, jax.Array) and jaxs.devices() == {jax.devices("cpu")[0]}
    assert bits_of(numpys) == bits_of(jaxs)
assert run.restore(framework="jax", device=device).tables["t"]["weight"].dtype == jnp.float32
assert ("torch" in sys.modules) == (device is not None)
""",
        device,
    )


def test_what_jax_cannot_hold_or_write_is_refused() -> None:
    run("""
class Counting(MemoryStore):
    asked = 0
    def get(self, key):
        self.asked += "/c/" in key
        return super().get(key)

store = Counting()
run = crf.open_run(store, "a")
wide = {"weight": np.ones((4, 2), np.float32), "steps": np.arange(4) + 2**40}
run.save(crf.State(tables={"t": crf.Table(wide)}, tensors={"wide": np.ones(3), "when": np.zeros(2, "datetime64[s]")}))
store.asked = 0
for device in (None, "cpu"):
    refused(lambda: run.load(framework="jax", device=device), "table 't', field 'steps'", "int64", "jax_enable_x64")
    refused(lambda: run.latest().tensor("wide", framework="jax", device=device), "tensor 'wide'", "float64")
    refused(lambda: run.latest().tensor("when", framework="jax", device=device), "jax has no datetime64_s")
refused(lambda: run.latest().table("t").read(out={"weight": jnp.ones((4, 2))}), "out['weight'] of table 't'",
        "jax's arrays cannot be written to", "framework='jax'")
refused(lambda: run.load(out=crf.State(tensors={"wide": jnp.ones(3)})), "out tensor 'wide'", "cannot be written to")
assert store.asked == 0
assert run.latest().table("t").read(fields=["weight"], framework="jax")["weight"].tolist() == [[1, 1]] * 4
jax.config.update("jax_enable_x64", True)
for device in (None, "cpu"):
    out = crf.State(tensors={"when": np.zeros(2, "datetime64[s]")})
    found = run.load(framework="jax", device=device, out=out)
    steps = found.tables["t"]["steps"]
    assert steps.dtype == jnp.int64 and steps.tolist() == wide["steps"].tolist()
    assert found.tensors["wide"].dtype == jnp.float64
""")


def test_exchange_with_torch() -> None:
    """What torch saved jax reads, and the other way round, into tensors."""
    run("""
import torch
run = crf.open_run(MemoryStore(), "a", policy="consecutive")
run.save(crf.State(tables={"t": crf.Table({"weight": torch.arange(12.0).reshape(6, 2)})}))
read = run.restore(framework="jax").tables["t"]["weight"]
newer = read.at[jnp.array([1, 4])].add(100)
run.save(crf.State(tables={"t": crf.Table({"weight": newer}, changed=jnp.array([1, 4]))}))
out = torch.zeros(6, 2)
run.load(out=crf.State(tables={"t": crf.Table({"weight": out})}))
assert out.tolist() == newer.tolist() == [[0, 1], [102, 103], [4, 5], [6, 7], [108, 109], [10, 11]]
assert run.latest().table("t").stored_rows == 2
""")
