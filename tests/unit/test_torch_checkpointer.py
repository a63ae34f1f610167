"""A trainer that is saved and restored goes on as if nothing had happened."""

from __future__ import annotations

import copy
import datetime as dt
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import checkrun_format as crf
from checkrun_format.errors import (
    CheckpointNotFoundError,
    DamagedError,
    InvalidInputError,
    StorageError,
    TrackingWarning,
)
from checkrun_format.stores import Buffer, LocalStore
from checkrun_format.torch import (
    Checkpointer,
    PendingSave,
    ReaderBudget,
    SaveCancelledError,
    capture_rng,
    register_optimizer,
    restore_rng,
)

Optimizers = list[torch.optim.Optimizer]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch's own, of Adagrad
    pytest.mark.filterwarnings("ignore:stored full"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than these small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RowWiseAdagrad(torch.optim.Optimizer):
    """One sum per row."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sums = self.state[p].setdefault("sum", torch.zeros(len(p)))
                    grad = p.grad.to_dense()
                    sums.add_(grad.square().mean(1))
                    p.sub_(group["lr"] * grad / (sums.sqrt() + 1e-8)[:, None])


register_optimizer(RowWiseAdagrad)


class Model(nn.Module):
    def __init__(self, seed: int = 0, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user = nn.EmbeddingBag(300, 8, mode="sum", sparse=sparse)
        self.item = nn.Embedding(200, 4, sparse=sparse)
        self.top = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> Any:
        return self.top(torch.cat([self.user(users), self.item(items)], 1))

    @property
    def weights(self) -> list[Any]:
        return [self.user.weight, self.item.weight]


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: Iterable[int]) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        users, items = torch.randint(300, (8, 3), generator=draw), torch.randint(200, (8,), generator=draw)
        torch.manual_seed(step)  # of the dropout
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(users, items) - torch.rand(8, 1, generator=draw)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def both(tables: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Model], Optimizers]:
    return lambda m: [tables(m.weights), torch.optim.Adam(m.top.parameters(), lr=0.01)]


MAKERS: dict[str, tuple[bool, Callable[[Model], Optimizers]]] = {
    "sgd": (True, both(lambda p: torch.optim.SGD(p, lr=0.1))),
    "momentum": (False, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True)]),
    "sparse momentum": (True, both(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))),
    "adagrad": (True, both(lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01))),
    "dense adagrad": (False, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)]),
    "row-wise adagrad": (True, both(RowWiseAdagrad)),
    "sparse adam": (True, both(lambda p: torch.optim.SparseAdam(p, lr=0.01))),
    "adam": (False, lambda m: [torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True)]),
    "nadam": (False, lambda m: [torch.optim.NAdam(m.parameters(), lr=0.01)]),
    "tensor lr": (False, lambda m: [torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01))]),
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().to_dense().flatten().tolist())
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return value


def state_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Any:
    return plain([dict(model.state_dict()), *(optimizer.state_dict() for optimizer in optimizers)])


def made(maker: str, seed: int = 0) -> tuple[Model, Optimizers]:
    sparse, make = MAKERS[maker]
    model = Model(seed, sparse=sparse)
    return model, make(model)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_bit_for_bit(tmp_path: Path, maker: str, background: bool) -> None:
    """Base, two increments, a restore into objects of another seed; against training that was never interrupted."""
    model, optimizers = made(maker)
    with Checkpointer(tmp_path, model, optimizers, policy="consecutive", durable=False) as checkpointer:
        for last in (5, 10, 15):
            train(model, optimizers, range(last - 5, last))
            if background:
                pending = checkpointer.save_async(last)
                assert pending is not None
                assert pending.staged.done()
                train(model, optimizers, range(1000, 1002))  # what is stored must not see it
                assert pending.result().step == last
                model, optimizers = made(maker, seed=1)
                checkpointer.close()
                checkpointer = Checkpointer(tmp_path, model, optimizers, policy="consecutive", durable=False)  # noqa: PLW2901
                assert checkpointer.restore() is not None
            else:
                assert checkpointer.save(last).step == last
    never, its_optimizers = made(maker)
    train(never, its_optimizers, range(15))
    again, again_optimizers = made(maker, seed=7)
    train(again, again_optimizers, range(3))
    restoring = Checkpointer(tmp_path, again, again_optimizers, durable=False)
    weights, state = list(again.parameters()), again_optimizers[0].state
    restored = restoring.restore()
    assert restored is not None
    assert (restored.step, restored.problems, restoring.step) == (15, (), 15)
    assert all(ours is theirs for ours, theirs in zip(weights, again.parameters(), strict=True))
    assert again_optimizers[0].state is state
    assert state_of(again, again_optimizers) == state_of(never, its_optimizers)
    train(again, again_optimizers, range(15, 20))
    train(never, its_optimizers, range(15, 20))
    assert state_of(again, again_optimizers) == state_of(never, its_optimizers)
    restoring.close()


@pytest.mark.parametrize(
    ("maker", "storage"), [("sparse adam", "changed"), ("row-wise adagrad", "changed"), ("adam", "full")]
)
def test_fields_and_storage(tmp_path: Path, maker: str, storage: str) -> None:
    model, optimizers = made(maker)
    with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
        train(model, optimizers, range(3))
        first = checkpointer.save(3)
        assert first.tables == ["user.weight", "item.weight"]
        fields = {f.name: (f.dtype, f.columns) for f in first.table("user.weight").fields}
        assert fields.pop("weight") == ("float32", 8)
        wide = ("float32", 8)
        assert (
            fields
            == {
                "sparse adam": {"exp_avg": wide, "exp_avg_sq": wide},
                "row-wise adagrad": {"sum": ("float32", None)},
                "adam": {"exp_avg": wide, "exp_avg_sq": wide, "max_exp_avg_sq": wide},
            }[maker]
        )
        assert "top.1.running_mean" in first.tensors
        assert any(name.startswith("top.0.weight:optimizer") for name in first.tensors)
        train(model, optimizers, range(3, 4))
        second = checkpointer.save(4)
        assert second.table("user.weight").storage == storage
        assert second.table("user.weight").stored_rows <= (300 if storage == "full" else 48)


def test_the_state_of_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    model, optimizers = made("adam")
    with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
        checkpointer.save(0)
        wanted = state_of(model, optimizers)
        train(model, optimizers, range(2))
        checkpointer.restore()
        assert state_of(model, optimizers) == wanted
        train(model, optimizers, range(2))
        assert checkpointer.save(2).table("user.weight").storage == "full"


def test_what_extra_and_stateful_objects_hold(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Model, Optimizers, dict[str, Any]]:
        model, optimizers = made("sgd", seed)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1])  # its `best` is infinite to begin with
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], T_max=10)
        return model, optimizers, {"plateau": plateau, "cosine": cosine, "scaler": torch.amp.GradScaler("cpu")}

    def draw() -> list[Any]:
        numbers = [torch.rand(2), torch.rand(2, generator=draws), sampler.random(2)]
        numbers += [np.random.random(2), random.random()]  # noqa: NPY002 - the global generator is saved, too
        return [np.asarray(one).tolist() for one in numbers]

    draws, sampler = torch.Generator().manual_seed(3), np.random.default_rng(5)
    model, optimizers, others = build(0)
    with Checkpointer(tmp_path, model, optimizers, stateful=others, durable=False) as checkpointer:
        train(model, optimizers, range(2))
        others["cosine"].step()
        rng: dict[str, Any] = {"draws": draws, "sampler": sampler}
        checkpointer.save(2, extra={"rng": capture_rng(rng), "offset": 812, "files": ["a", "b"]})
        wanted = draw()
    model, optimizers, theirs = build(1)
    with Checkpointer(tmp_path, model, optimizers, stateful=theirs, durable=False) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert (restored.extra["offset"], restored.extra["files"]) == (812, ["a", "b"])
    assert {name: o.state_dict() for name, o in theirs.items()} == {name: o.state_dict() for name, o in others.items()}
    restore_rng(restored.extra["rng"], {"draws": draws, "sampler": sampler})
    assert draw() == wanted
    with pytest.raises(InvalidInputError, match=r"generators \[\] given, \['draws', 'sampler'\] were captured"):
        restore_rng(restored.extra["rng"])
    with pytest.raises(InvalidInputError, match="no state of capture_rng"):
        restore_rng({})


@pytest.mark.parametrize(
    "part",
    [{"torch": "AAAA"}, {"torch": None}, {"python": [3, [1], None]}, {"numpy": {}}, {"generators": {"a": "AAAA"}}],
)
def test_an_altered_state_of_generators_changes_none(part: dict[str, Any]) -> None:
    generators = {"a": torch.Generator()}
    state = capture_rng(generators)
    draw = random.random(), np.random.random(), float(torch.rand(1))  # noqa: NPY002
    now = capture_rng(generators)
    with pytest.raises(InvalidInputError, match="restore_rng: a state of another generator, or altered"):
        restore_rng(state | part, generators)
    assert capture_rng(generators) == now
    restore_rng(state, generators)
    assert draw == (random.random(), np.random.random(), float(torch.rand(1)))  # noqa: NPY002


class TestRestoring:
    def test_fallback_passes_over_damage_where_there_may_be_nothing(self, tmp_path: Path) -> None:
        with Checkpointer(tmp_path, Model(), durable=False) as checkpointer:
            assert checkpointer.restore(missing_ok=True, fallback=True) is None
            with pytest.raises(crf.CheckpointNotFoundError):
                checkpointer.restore(fallback=True)
            checkpointer.save(1)
            checkpointer.save(2)
        (tmp_path / "00000002/zarr.json").write_bytes(b"{")
        with Checkpointer(tmp_path, Model(), durable=False) as checkpointer:
            with pytest.raises(crf.DamagedError, match="00000002"):
                checkpointer.restore(missing_ok=True)
            with pytest.warns(crf.FallbackWarning, match="restoring checkpoint 1; newer ones"):
                restored = checkpointer.restore(missing_ok=True, fallback=True)
            assert restored is not None and (restored.checkpoint.sequence, checkpointer.step) == (1, 1)

    def test_an_empty_run(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers) as checkpointer:
            assert checkpointer.restore(missing_ok=True) is None
            with pytest.raises(CheckpointNotFoundError):
                checkpointer.restore()

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (
                lambda m: setattr(m, "user", nn.EmbeddingBag(300, 9, sparse=True)),
                "table 'user.weight': the checkpoint's",
            ),
            (lambda m: setattr(m, "user", nn.EmbeddingBag(299, 8, sparse=True)), "of 300 rows, the model's (299, 8)"),
            (lambda m: setattr(m, "user", nn.EmbeddingBag(301, 8, sparse=True)), "300 rows in the checkpoint, 301 in"),
            (lambda m: setattr(m, "more", nn.Embedding(3, 8, sparse=True)), "table 'more.weight' is not in the check"),
            (lambda m: delattr(m, "item"), "table 'item.weight' is not in the model"),
            (lambda m: setattr(m, "bias", nn.Parameter(torch.zeros(3))), "tensor 'bias' is not in the checkpoint"),
            (lambda m: delattr(m, "top"), "tensor 'top.0.weight' is not in the model"),
            (lambda m: m.double(), "('float32', (6, 12)) in the checkpoint, ('float64', (6, 12)) in the model"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_anything_changes(
        self, tmp_path: Path, change: Callable[[Any], Any], problem: str
    ) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, None, durable=False) as checkpointer:
            train(model, optimizers, range(1))
            checkpointer.save(1)
        other = Model(3)
        change(other)
        before = plain(dict(other.state_dict()))
        with Checkpointer(tmp_path, other, None, durable=False) as checkpointer:
            with pytest.raises(InvalidInputError) as caught:
                checkpointer.restore()
            assert problem in str(caught.value)
            assert plain(dict(other.state_dict())) == before
            restored = checkpointer.restore(strict=False)
            assert restored is not None
            assert any(problem in told for told in restored.problems)
            saved = checkpointer.save(2)
            for name in saved.tables:
                assert torch.equal(torch.from_numpy(saved.table(name).read()["weight"]), other.state_dict()[name])

    def test_a_table_that_grew(self, tmp_path: Path) -> None:
        model, optimizers = made("sparse adam")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            train(model, optimizers, range(2))
            checkpointer.save(2)
        grown = Model(3)
        grown.user = nn.EmbeddingBag(310, 8, mode="sum", sparse=True)
        new_rows = grown.user.weight[300:].detach().clone()
        others = MAKERS["sparse adam"][1](grown)
        with Checkpointer(tmp_path, grown, others, durable=False) as checkpointer:
            restored = checkpointer.restore(strict=False)
            assert restored is not None
            assert restored.problems == ("table 'user.weight': 300 rows in the checkpoint, 310 in the model",)
            assert torch.equal(grown.user.weight[:300], model.user.weight)
            assert torch.equal(grown.user.weight[300:], new_rows)
            assert torch.equal(
                others[0].state[grown.user.weight]["exp_avg"][:300], optimizers[0].state[model.user.weight]["exp_avg"]
            )
            assert not others[0].state[grown.user.weight]["exp_avg"][300:].any()
            saved = checkpointer.save(3)
            assert np.array_equal(saved.table("user.weight").read()["weight"], grown.user.weight.detach().numpy())

    def test_state_of_parameters_that_have_another_shape_stays(self, tmp_path: Path) -> None:
        model, optimizers = made("adam")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            train(model, optimizers, range(2))
            checkpointer.save(2)
        other = Model(3, sparse=False)
        other.item = nn.Embedding(200, 5)
        other.top[0] = nn.Linear(13, 6)
        others = MAKERS["adam"][1](other)
        with Checkpointer(tmp_path, other, others, durable=False) as checkpointer:
            assert checkpointer.restore(strict=False) is not None
            train(other, others, range(2, 4))
            assert others[0].state[other.item.weight]["exp_avg"].shape == (200, 5)
            saved = checkpointer.save(4)
            assert np.array_equal(saved.table("item.weight").read()["weight"], other.item.weight.detach().numpy())

    def test_another_optimizer_is_refused(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            checkpointer.save(1)
        for others, problem in (
            ([torch.optim.Adagrad(model.weights), optimizers[1]], "optimizer-0 is a Adagrad, in the checkpoint a SGD"),
            ([optimizers[0]], "the checkpoint's optimizer-1 was not given"),
            ([torch.optim.SGD(model.weights[:1]), optimizers[1]], "groups of optimizer-0 hold other parameters"),
        ):
            with (
                Checkpointer(tmp_path, model, others, durable=False) as checkpointer,
                pytest.raises(InvalidInputError, match=problem),
            ):
                checkpointer.restore()

    def test_a_chosen_checkpoint(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            checkpointer.save(1)
            wanted = state_of(model, optimizers)
            train(model, optimizers, range(2))
            checkpointer.save(2)
            assert checkpointer.restore(1).step == 1  # type: ignore[union-attr]
            assert state_of(model, optimizers) == wanted
            train(model, optimizers, range(1))
            assert checkpointer.save(3).parent is None, "not over the latest, which was left"

    def test_a_run_of_somebody_else(self, tmp_path: Path) -> None:
        weight = np.random.default_rng(0).random((300, 8), np.float32)
        run = crf.open_run(tmp_path, "a", durable=False)
        run.save(crf.State(tables={"user.weight": crf.Table({"weight": weight})}, extra={"mine": 1}), step=4)
        model = Model()
        with Checkpointer(run, model) as checkpointer:
            restored = checkpointer.restore(strict=False)
            assert restored is not None
            assert restored.extra == {"mine": 1}
            assert np.array_equal(model.user.weight.detach().numpy(), weight)

    def test_quantized_rows(self, tmp_path: Path) -> None:
        model, optimizers = made("adagrad")
        with Checkpointer(tmp_path, model, optimizers, bits=8, durable=False) as checkpointer:
            train(model, optimizers, range(3))
            saved = checkpointer.save(3)
            sums = optimizers[0].state[model.user.weight]["sum"].clone()
            stored = saved.table("user.weight").read()
            assert 0 < np.abs(stored["weight"] - model.user.weight.detach().numpy()).max() < 0.05
            checkpointer.restore()
            assert np.array_equal(model.user.weight.detach().numpy(), stored["weight"])
            assert torch.equal(optimizers[0].state[model.user.weight]["sum"], sums)
            train(model, optimizers, range(3, 4))
            assert checkpointer.save(4).table("user.weight").storage == "changed"


class TestWhatIsNoted:
    def test_a_loaded_state_of_an_optimizer(self, tmp_path: Path) -> None:
        model, optimizers = made("sparse adam")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            train(model, optimizers, range(2))
            checkpointer.save(1)
            state = copy.deepcopy(optimizers[0].state_dict())
            state["state"][0]["exp_avg"] += 1
            optimizers[0].load_state_dict(state)
            with pytest.warns(TrackingWarning, match="its optimizer loaded a state"):
                saved = checkpointer.save(2)
            assert saved.table("user.weight").storage == "full"
            assert np.array_equal(
                saved.table("user.weight").read()["exp_avg"], optimizers[0].state[model.user.weight]["exp_avg"].numpy()
            )

    def test_the_reason_is_told_once(self, tmp_path: Path) -> None:
        model, optimizers = made("adam")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            checkpointer.save(1)
            train(model, optimizers, range(2))
            with pytest.warns(TrackingWarning) as told:
                checkpointer.save(2)
            assert [str(one.message) for one in told] == [
                "stored full, table 'user.weight', 'item.weight': Adam changes the state of every row in each step"
            ]
            train(model, optimizers, range(2))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                checkpointer.save(3)

    def test_a_sample_finds_what_torch_does_not_see(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            checkpointer.save(1)
            model.user.weight.data[7] += 1
            with pytest.warns(TrackingWarning, match="'user.weight': a sample of its rows changed without being noted"):
                saved = checkpointer.save(2)
            assert saved.table("user.weight").storage == "full"
            assert saved.table("item.weight").storage == "unchanged"
            assert np.array_equal(saved.table("user.weight").read()["weight"], model.user.weight.detach().numpy())

    def test_check_tells_what_was_missed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model, optimizers = made("adagrad")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            with checkpointer.check() as found:
                train(model, optimizers, range(3))
            assert found.missed == {}
            assert capsys.readouterr().out == "all rows that changed were noted, in 2 tables\n"
            for optimizer in optimizers:
                optimizer.zero_grad()
            checkpointer.save(1)
            with checkpointer.check() as found:
                model.user.weight.data[[3, 299]] += 1
                optimizers[0].state[model.item.weight]["sum"].data[5] += 1
            assert {name: (m.rows.tolist(), m.fields) for name, m in found.missed.items()} == {
                "user.weight": ([3, 299], ("weight",)),
                "item.weight": ([5], ("sum",)),
            }
            printed = capsys.readouterr().out
            assert "table 'user.weight': 2 rows changed without being noted, [3, 299] in all, in weight" in printed
            assert "something wrote into the optimizer's state" in printed

    def test_marks(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            checkpointer.save(1)
            checkpointer.mark("user.weight", [3, 5])
            checkpointer.mark("user.weight", np.array([299]))
            checkpointer.mark("user.weight", [])
            assert checkpointer.save(2).table("user.weight").stored_rows == 3
            checkpointer.mark("item.weight", crf.ALL)
            assert checkpointer.save(3).table("item.weight").storage == "full"
            with pytest.raises(InvalidInputError, match=r"there is no table 'x'; there are user\.weight, item\.weight"):
                checkpointer.mark("x", [1])

    def test_accumulation_across_a_save(self, tmp_path: Path) -> None:
        model = nn.Embedding(50, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(tmp_path, model, optimizer, policy="consecutive", durable=False) as checkpointer:
            checkpointer.save(0)
            for row in (1, 2):
                model(torch.tensor([row])).sum().backward()
            assert checkpointer.save(1).table("weight").stored_rows == 2
            model(torch.tensor([3])).sum().backward()
            optimizer.step()
            saved = checkpointer.save(2)
            assert saved.table("weight").stored_rows == 3
            assert np.array_equal(saved.table("weight").read()["weight"], model.weight.detach().numpy())


class Counting(nn.Module):
    """Keeps numbers that are neither parameters nor buffers, as a tensor in the state dict or as something else."""

    def __init__(self, numbers: list[float], *, as_tensor: bool) -> None:
        super().__init__()
        self.numbers = numbers
        self._as_tensor = as_tensor

    def get_extra_state(self) -> Any:
        return torch.tensor(self.numbers) if self._as_tensor else {"numbers": self.numbers}

    def set_extra_state(self, state: Any) -> None:
        self.numbers = state.tolist() if self._as_tensor else state["numbers"]


class TestWhatElseHappens:
    """To a model, an optimizer or a run beside the Checkpointer."""

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_extra_state_of_modules(self, tmp_path: Path, as_tensor: bool) -> None:
        saved, restored = (
            nn.Sequential(nn.Embedding(5, 2), Counting(numbers, as_tensor=as_tensor)) for numbers in ([3.0, 4.0], [1.0])
        )
        with Checkpointer(tmp_path, saved, durable=False) as checkpointer:
            checkpointer.save(1)
        with Checkpointer(tmp_path, restored, durable=False) as checkpointer:
            checkpointer.restore()
        assert restored[1].numbers == [3.0, 4.0]

    def test_two_that_share_a_run(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", policy="consecutive", durable=False)
        trainers = []
        for seed in (1, 2):
            model, optimizers = made("sgd", seed)
            trainers.append((model, optimizers, Checkpointer(run, model, optimizers)))
        for step in range(4):
            model, optimizers, checkpointer = trainers[step % 2]
            train(model, optimizers, [step])
            saved = checkpointer.save(step)
            for name in saved.tables:
                assert np.array_equal(saved.table(name).read()["weight"], model.state_dict()[name].numpy()), step

    def test_a_run_that_is_removed(self, tmp_path: Path) -> None:
        """Nothing is laid over what is gone."""
        model, optimizers = made("sgd")
        options: dict[str, Any] = {"policy": "consecutive", "durable": False}
        with Checkpointer(tmp_path / "run", model, optimizers, **options) as checkpointer:
            checkpointer.save(0)
            shutil.rmtree(tmp_path / "run")
            train(model, optimizers, range(1))
            for save in (checkpointer.save, lambda step: checkpointer.save_async(step).result()):  # type: ignore[union-attr]
                with pytest.raises(DamagedError, match=r"00000001/zarr\.json: it is gone from .*: was the"):
                    save(1)
        with Checkpointer(tmp_path / "run", model, optimizers, **options) as checkpointer:
            saved = checkpointer.save(1)
        assert np.array_equal(saved.table("user.weight").read()["weight"], model.user.weight.detach().numpy())

    def test_a_restore_that_fails_halfway(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizers = made("sgd")
        options: dict[str, Any] = {"policy": "consecutive", "durable": False}
        with Checkpointer(tmp_path, model, optimizers, **options) as checkpointer:
            checkpointer.save(0)
            checkpointer.save(1)

            def failing(*_: Any, out: crf.State, **__: Any) -> None:
                torch.as_tensor(out.tables["user.weight"]["weight"]).numpy()[7] = 7
                raise StorageError("no more")

            with monkeypatch.context() as patched:
                patched.setattr(crf.Checkpoint, "load", failing)
                with pytest.raises(StorageError, match="no more"):
                    checkpointer.restore()
            assert model.user.weight[7].tolist() == [7] * 8
            saved = checkpointer.save(2)
            assert np.array_equal(saved.table("user.weight").read()["weight"], model.user.weight.detach().numpy())

    def test_a_commit_whose_save_was_interrupted_afterwards(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A table that was dropped by it is not dropped again."""
        options: dict[str, Any] = {"policy": "consecutive", "durable": False}
        with Checkpointer(tmp_path, Model(), **options) as checkpointer:
            checkpointer.save(0)
        model = Model(1)
        del model.item
        with Checkpointer(tmp_path, model, **options) as checkpointer:
            checkpointer.restore(strict=False)
            save = checkpointer.run.save

            def interrupted(*arguments: Any, **named: Any) -> None:
                save(*arguments, **named)
                raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                patched.setattr(checkpointer.run, "save", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    checkpointer.save(1)
            saved = checkpointer.save(2)
        assert (saved.sequence, saved.tables) == (3, ["user.weight"])

    def test_an_optimizer_that_was_not_given(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            checkpointer.save(0)
            later = torch.optim.Adagrad([model.user.weight])
            train(model, [later], range(2))
            with pytest.warns(
                TrackingWarning, match=r"Adagrad trains table 'user\.weight' and was not given to the Check"
            ):
                checkpointer.save(1)
            train(model, [later, *optimizers], range(2, 4))
            saved = checkpointer.save(2)
        assert np.array_equal(saved.table("user.weight").read()["weight"], model.user.weight.detach().numpy())
        with Checkpointer(tmp_path, model, [*optimizers, later], durable=False) as checkpointer:
            assert checkpointer.save(3).table("user.weight").fields[-1].name == "sum"

    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize("bits", [None, 4])
    def test_what_was_saved_may_be_resized(self, tmp_path: Path, background: bool, bits: int | None) -> None:
        """As torch does in many places; not after `Tensor.numpy()`."""
        model, optimizers = made("adagrad")
        policy = "consecutive"
        with Checkpointer(tmp_path, model, optimizers, policy=policy, bits=bits, durable=False) as checkpointer:
            for step in range(2):
                (checkpointer.save_async if background else checkpointer.save)(step)
                train(model, optimizers, [step])
            checkpointer.save(2)
        tensors = [*model.parameters(), *(s["sum"] for s in optimizers[0].state.values())]
        for tensor in tensors:
            tensor.untyped_storage().resize_(2 * tensor.nbytes)
            assert tensor.untyped_storage().nbytes() == 2 * tensor.nbytes

    def test_no_rows(self, tmp_path: Path) -> None:
        model = nn.Embedding(0, 4)
        with Checkpointer(tmp_path, model, policy="consecutive", durable=False) as checkpointer:
            for step in range(3):
                checkpointer.save(step)
        with Checkpointer(tmp_path, model, durable=False) as checkpointer:
            restored = checkpointer.restore()
        assert restored is not None
        assert restored.checkpoint.table("weight").read()["weight"].shape == (0, 4)


class TestRefusals:
    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda m: m.register_buffer("c", torch.eye(2).to_sparse()), "tensor 'c' is a torch.sparse_coo tensor"),
            (lambda m: m.register_buffer("c", torch.ones(2, device="meta")), "tensor 'c' has no values yet"),
            (lambda m: m.add_module("c", nn.LazyLinear(2)), r"tensor 'c\.weight' has no values yet"),
        ],
    )
    def test_tensors_without_plain_values(
        self, tmp_path: Path, change: Callable[[Any], Any], match: str, background: bool
    ) -> None:
        model = Model()
        change(model)
        with Checkpointer(tmp_path, model, durable=False) as checkpointer:
            with pytest.raises(InvalidInputError, match=match):
                (checkpointer.save_async if background else checkpointer.save)(1)
            assert checkpointer.run.latest(None) is None

    def test_a_parameter_that_the_optimizer_gets_later(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers, durable=False) as checkpointer:
            optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
            with pytest.raises(
                InvalidInputError, match=r"optimizer-0 holds a parameter \(3,\) that is not in the model"
            ):
                checkpointer.save(1)

    def test_what_is_no_model(self, tmp_path: Path) -> None:
        model: Any = [Model()]
        with pytest.raises(InvalidInputError, match=r"model: a list where a torch\.nn\.Module belongs"):
            Checkpointer(tmp_path, model)
        stateful: Any = {"epoch": 3}
        with pytest.raises(InvalidInputError, match=r"'epoch' is a int, which has no state_dict\(\)"):
            Checkpointer(tmp_path, Model(), stateful=stateful)
        stateful = [torch.optim.lr_scheduler.StepLR(made("sgd")[1][0], 3)]
        with pytest.raises(InvalidInputError, match="stateful: a list; give a mapping of names to objects"):
            Checkpointer(tmp_path, Model(), stateful=stateful)

    def test_a_run_that_is_open_for_reading(self, tmp_path: Path) -> None:
        """Refused at once, not by the first save, hours later."""
        crf.open_run(tmp_path, "a", durable=False)
        with pytest.raises(InvalidInputError, match=r"open for reading; open_run\(\.\.\., mode='a'\)"):
            Checkpointer(crf.open_run(tmp_path), Model())

    def test_after_close(self, tmp_path: Path) -> None:
        with Checkpointer(tmp_path, Model(), durable=False) as checkpointer:
            checkpointer.save(1)
        checkpointer.close()
        for call in (checkpointer.save, checkpointer.save_async, checkpointer.restore):
            with pytest.raises(InvalidInputError, match="this Checkpointer is closed"):
                call()
        assert checkpointer.run.latest().sequence == 1

    def test_a_parameter_outside_of_the_model(self, tmp_path: Path) -> None:
        model = Model()
        loss = nn.Parameter(torch.zeros(3))
        with pytest.raises(InvalidInputError, match=r"optimizer holds a parameter \(3,\) that is not in the model"):
            Checkpointer(tmp_path, model, torch.optim.SGD([*model.parameters(), loss], lr=0.1))
        assert list(tmp_path.iterdir()) == []

    def test_a_replaced_parameter(self, tmp_path: Path) -> None:
        model = Model()
        with Checkpointer(tmp_path, model, durable=False) as checkpointer:
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            with pytest.raises(InvalidInputError, match=r"parameter 'user\.weight' was replaced"):
                checkpointer.save(1)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"every": 0}, "every=0"),
            ({"every": 1.5}, "every=1.5"),
            ({"on_busy": "fail"}, "on_busy='fail'"),
            ({"bits": 9}, "bits: 9"),
            ({"budget": object()}, "budget= needs every="),
            ({"optimizer": "adam"}, "where a torch.optim.Optimizer belongs"),
        ],
    )
    def test_options(self, tmp_path: Path, options: dict[str, Any], match: str) -> None:
        with pytest.raises(InvalidInputError, match=match):
            Checkpointer(tmp_path, Model(), **options)

    def test_options_of_an_open_run(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match=r"bits= belongs to open_run\(\)"):
            Checkpointer(crf.open_run(tmp_path, "a"), Model(), bits=4)

    def test_steps_and_extra(self, tmp_path: Path) -> None:
        with Checkpointer(tmp_path, Model(), durable=False) as checkpointer:
            for background in (checkpointer.save, checkpointer.save_async):
                with pytest.raises(InvalidInputError, match="step -1"):
                    background(-1)
                with pytest.raises(InvalidInputError, match="extra"):
                    background(1, extra=object())
            assert checkpointer.run.latest(None) is None
            assert checkpointer.save(np.int64(7)).step == 7  # type: ignore[arg-type]


class GatedStore(LocalStore):
    """Stores nothing but run and commit until it may; or fails."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, durable=False)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        assert self.gate.wait(30)
        if self.fails:
            raise StorageError(28, f"{key}: no space left")
        return super().put(key, buffers)


class Setting:
    """A trainer, and a store that can be held up."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = GatedStore(folder)
        self.run = crf.open_run(self.store, "a", policy="consecutive")
        self.model, self.optimizers = made("adagrad")
        self.checkpointer = Checkpointer(self.run, self.model, self.optimizers, **options)

    def train(self, *steps: int) -> None:
        train(self.model, self.optimizers, steps)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def begin(self, step: int) -> PendingSave:
        pending = self.checkpointer.save_async(step)
        assert pending is not None
        return pending

    def assert_stored(self, number: int, state: dict[str, torch.Tensor]) -> None:
        loaded = self.run[number].load()
        for name, value in state.items():
            stored = loaded.tables[name]["weight"] if name in loaded.tables else loaded.tensors[name]
            assert np.array_equal(stored, value.numpy()), name


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


OWNERS = {
    "tracker.clear": "tracker.Tracker.clear",
    "run.save": "checkpointer.Run.save",
    "_warn": "changes.Changes._warn",
}


class TestInTheBackground:
    def test_whatever_changes_after_staging_is_not_stored(self, setting: Setting) -> None:
        """Tensor by tensor: each is overwritten while nothing has been stored yet."""
        for step in (1, 2, 3):
            setting.train(step, step + 10)
            wanted = setting.state()
            sums = {
                n: setting.optimizers[0].state[p]["sum"].clone()
                for n, p in setting.model.named_parameters()
                if "top" not in n
            }
            moments = plain(setting.optimizers[1].state_dict())
            setting.store.gate.clear()
            pending = setting.begin(step)
            assert (pending.staged.done(), pending.done()) == (True, False)
            held = [v for o in setting.optimizers for s in o.state.values() for v in s.values()]
            saved = [value.clone() for value in held]
            for value in (*setting.model.state_dict().values(), *held):
                value.fill_(9)
            setting.store.gate.set()
            made_of = pending.result(30)
            setting.assert_stored(made_of.sequence, wanted)
            for name, values in sums.items():
                assert np.array_equal(made_of.table(name).read()["sum"], values.numpy())
            setting.model.load_state_dict(wanted)
            for value, before in zip(held, saved, strict=True):
                value.copy_(before)
            again, others = made("adagrad", seed=4)
            with Checkpointer(setting.run, again, others) as reader:
                reader.restore()
            assert plain(others[1].state_dict()) == moments
            setting.checkpointer.restore()

    def test_tables_of_any_size_are_gathered(self, tmp_path: Path) -> None:
        """Small ones together, large ones in pieces; each row is overwritten while nothing has been stored yet."""
        torch.manual_seed(0)
        kinds = [(torch.float32, 64), (torch.bfloat16, 3), (torch.float16, 1), (torch.float64, 5)]
        sizes = [4, 1, 30_000, 700, 9, 20_000, 50, 1300, 12_000]
        tables = [nn.Embedding(rows, kinds[n % 4][1], dtype=kinds[n % 4][0]) for n, rows in enumerate(sizes)]
        model = nn.ModuleList(tables)
        store = GatedStore(tmp_path)
        run = crf.open_run(store, "a", policy="consecutive")
        with Checkpointer(run, model, torch.optim.SGD(model.parameters(), lr=0.1)) as checkpointer:
            first = checkpointer.save()
            wanted, stored = {}, {}
            for n, (rows, table) in enumerate(zip(sizes, tables, strict=True)):
                some = torch.nonzero(torch.rand(rows) < 0.6).squeeze(1)
                table.weight.data[some] = torch.rand(len(some), table.embedding_dim).to(table.weight.dtype)
                checkpointer.mark(f"{n}.weight", some)
                wanted[f"{n}.weight"] = table.weight.detach().double().numpy().copy()
                stored[f"{n}.weight"] = len(some)
            store.gate.clear()
            pending = checkpointer.save_async(1)
            assert pending is not None and pending.staged.done()
            for table in tables:
                table.weight.data.fill_(9)
            store.gate.set()
            made_of = pending.result(60)
        assert made_of.parent == first.sequence
        for name, values in wanted.items():
            assert made_of.table(name).stored_rows == stored[name]
            assert np.array_equal(made_of.table(name).read()["weight"].astype(np.float64), values)

    def test_the_next_save_waits(self, setting: Setting) -> None:
        setting.store.gate.clear()
        first = setting.begin(1)
        threading.Timer(0.2, setting.store.gate.set).start()
        second = setting.begin(2)
        assert first.done()
        assert (first.result().sequence, second.result(30).sequence) == (1, 2)

    def test_the_next_save_is_skipped(self, tmp_path: Path) -> None:
        setting = Setting(tmp_path, on_busy="skip")
        setting.begin(0).result(30)
        setting.train(1)
        setting.store.gate.clear()
        first = setting.begin(1)
        setting.train(2)
        assert setting.checkpointer.save_async(2) is None
        setting.store.gate.set()
        first.result(30)
        setting.train(3)
        last = setting.begin(3).result(30)
        assert last.sequence == 3
        setting.assert_stored(3, setting.state())

    def test_the_save_before_is_cancelled(self, tmp_path: Path) -> None:
        setting = Setting(tmp_path, on_busy="cancel")
        setting.begin(0).result(30)
        setting.train(1)
        setting.store.gate.clear()
        first = setting.begin(1)
        first.cancel()
        setting.train(2)
        threading.Timer(0.2, setting.store.gate.set).start()
        second = setting.begin(2)
        with pytest.raises(SaveCancelledError):
            first.result()
        assert second.result(30).sequence == 2
        setting.assert_stored(2, setting.state())
        assert {path.name for path in tmp_path.iterdir()} == {"zarr.json", "00000001", "00000002"}

    def test_a_failure_surfaces_once_and_loses_nothing(self, setting: Setting) -> None:
        setting.begin(0).result(30)
        setting.train(1)
        setting.store.fails = True
        failed = setting.begin(1)
        failed.wait(30)
        setting.train(2)
        with pytest.raises(StorageError, match="no space left") as caught:
            setting.checkpointer.step_done(2)
        assert caught.value.__notes__ == ["in the save of step 1, which went on in the background"]
        setting.store.fails = False
        saved = setting.begin(2).result(30)
        assert saved.table("user.weight").storage == "changed"
        setting.assert_stored(saved.sequence, setting.state())
        setting.checkpointer.close()

    def test_readers_go_on_after_a_failure(self, tmp_path: Path) -> None:
        budget = ReaderBudget()
        setting = Setting(tmp_path, every=2, budget=budget)
        setting.store.fails = True
        setting.checkpointer.step_done(1)
        assert setting.checkpointer._pending is not None
        setting.checkpointer._pending.wait(30)
        with pytest.raises(StorageError):
            setting.checkpointer.step_done(3)
        assert budget.allowed == 6
        setting.store.fails = False
        assert setting.checkpointer.save(4).sequence == 1

    def test_a_failure_that_was_seen_is_not_raised_again(self, setting: Setting) -> None:
        setting.store.fails = True
        with pytest.raises(StorageError):
            setting.begin(1).result(30)
        setting.store.fails = False
        assert setting.begin(1).result(30).sequence == 1

    def test_a_failure_surfaces_at_close(self, setting: Setting) -> None:
        setting.store.fails = True
        setting.begin(1)
        with pytest.raises(StorageError):
            setting.checkpointer.close()

    def test_the_error_of_the_training_is_not_hidden(self, setting: Setting) -> None:
        def failing() -> None:
            with setting.checkpointer:
                setting.store.fails = True
                setting.begin(1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            failing()
        assert "a save in the background failed" in caught.value.__notes__[0]

    def test_a_failing_copy_abandons_the_save(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        setting.begin(0).result(30)
        setting.train(1)
        monkeypatch.setattr(
            setting.checkpointer._copier, "rows", lambda *_: (_ for _ in ()).throw(MemoryError("no memory"))
        )
        with pytest.raises(MemoryError):
            setting.checkpointer.save_async(1)
        monkeypatch.undo()
        assert setting.begin(1).result(30).sequence == 2
        setting.assert_stored(2, setting.state())

    @pytest.mark.parametrize("place", ["tracker.Tracker.clear", "checkpointer.Run.save", "changes.Changes._warn"])
    @pytest.mark.parametrize("background", [False, True])
    def test_an_interrupt_loses_nothing(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch, place: str, background: bool
    ) -> None:
        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        setting.begin(0).result(30)
        setting.train(1)
        save = setting.checkpointer.save_async if background else setting.checkpointer.save
        with monkeypatch.context() as patch:
            patch.setattr(f"checkrun_format.torch.{place}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save(1)
        for optimizer in setting.optimizers:
            optimizer.zero_grad()
        saved = setting.checkpointer.save(1)
        assert saved.table("user.weight").storage == "changed"
        setting.assert_stored(saved.sequence, setting.state())

    def test_staging_memory_is_used_again(self, setting: Setting) -> None:
        addresses = set()
        for step in range(4):
            setting.train(step)
            setting.begin(step).result(30)
            memory = setting.checkpointer._copier._of_tables._memory
            assert memory is not None
            addresses.add(memory.data_ptr())
        assert len(addresses) == 1

    def test_an_attempt_that_had_landed_after_all(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        """HEA-3: its number is taken by ourselves, and the save is laid over it, from what was staged."""
        setting.begin(0).result(30)
        setting.train(1)
        create = LocalStore.create

        def lost(store: LocalStore, key: str, data: bytes) -> None:
            create(store, key, data)
            monkeypatch.setattr(LocalStore, "get", lambda *_: (_ for _ in ()).throw(StorageError(5, "gone")))
            raise StorageError(5, f"{key}: the answer was lost")

        monkeypatch.setattr(LocalStore, "create", lost)
        with pytest.raises(StorageError):
            setting.begin(1).result(30)
        monkeypatch.undo()
        setting.train(2)
        saved = setting.begin(2).result(30)
        assert saved.sequence == 3
        setting.assert_stored(3, setting.state())


class TestWhen:
    def test_every_so_many_steps(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        asked: list[int] = []
        with Checkpointer(tmp_path, model, optimizers, every=3, durable=False) as checkpointer:
            assert (checkpointer.step, checkpointer.until_save) == (0, 3)
            for step in range(checkpointer.step, 7):
                train(model, optimizers, [step])
                checkpointer.step_done(step, extra=lambda: asked.append(checkpointer.step))
            assert (checkpointer.step, checkpointer.until_save, asked) == (7, 2, [3, 6])
        run = crf.open_run(tmp_path)
        assert [c.step for c in run.log()] == [3, 6]
        with Checkpointer(tmp_path, model, optimizers, every=3, durable=False) as checkpointer:
            checkpointer.restore()
            assert checkpointer.step == 6

    def test_after_so_much_time(self, tmp_path: Path) -> None:
        model, optimizers = made("sgd")
        with Checkpointer(tmp_path, model, optimizers, every=dt.timedelta(hours=1), durable=False) as checkpointer:
            assert checkpointer.step_done(0) is None
            assert checkpointer.until_save is None
            checkpointer._schedule._saved_at -= 3601
            pending = checkpointer.step_done(1)
            assert pending is not None
            assert pending.result(30).step == 2
            assert checkpointer.step_done(2) is None
