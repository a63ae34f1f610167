"""Rows that change are noted, whatever changes them."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from checkrun_format.errors import InvalidInputError, TrackingWarning
from checkrun_format.torch import gradients
from checkrun_format.torch import tracker as tracking
from checkrun_format.torch.lookups import Tables, find_tables
from checkrun_format.torch.tracker import Taken, Tracker

ROWS = 50

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of Adagrad


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than these small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every table count as one whose dense gradients are too large to look through in each step."""
    monkeypatch.setattr(gradients, "_CHEAP_BYTES", -1)


def tracker_of(model: nn.Module, tables: Tables = None, optimizer: torch.optim.Optimizer | None = None) -> Tracker:
    def states(parameter: nn.Parameter) -> list[torch.Tensor]:
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        return [value for value in state.values() if torch.is_tensor(value)]

    return Tracker(find_tables(model, tables), states)


def take(tracker: Tracker) -> dict[str, Taken]:
    """A snapshot."""
    told = tracker.changed()
    tracker.clear(told)
    return told


def taken(tracker: Tracker, table: str = "weight") -> list[int] | str:
    """What a snapshot takes: rows, or why it takes all."""
    told = take(tracker)[table]
    return told.rows.tolist() if told.whole is None else told.whole


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def embedding(**options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, 4, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(*inputs).square().sum().backward()
    optimizer.step()


def look_up(model: nn.Embedding, rows: torch.Tensor, *, sparse: bool = False) -> Any:
    """Past the module."""
    loss: Any = functional.embedding(rows, model.weight, sparse=sparse).sum()
    return loss.backward()


SGD = torch.optim.SGD


class TestLookups:
    @pytest.mark.parametrize("sparse", [False, True])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    def test_a_forward_notes_its_rows(self, sparse: bool, dtype: torch.dtype) -> None:
        model = embedding(sparse=sparse)
        tracker = tracker_of(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer, ids(3, 7, 3, 49).reshape(2, 2).to(dtype))
        optimizer.zero_grad()
        assert taken(tracker) == [3, 7, 49]
        assert taken(tracker) == []

    @pytest.mark.parametrize("sparse", [False, True])
    def test_rows_of_any_shape_and_order_in_memory(self, sparse: bool) -> None:
        model = embedding(sparse=sparse)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        grid = torch.arange(6).reshape(2, 3)
        for rows, noted in [
            (grid.T, [0, 1, 2, 3, 4, 5]),
            (grid[:, ::2], [0, 2, 3, 5]),
            (grid[0, :1].expand(2, 2), [0]),
            (torch.tensor(7), [7]),
            (grid[:, :0], []),
        ]:
            train(model, optimizer, rows)
            optimizer.zero_grad()
            assert taken(tracker) == noted

    def test_a_gradient_that_is_sparse_in_its_columns_too(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        model.weight.grad = torch.sparse_coo_tensor(torch.tensor([[5, 9], [1, 3]]), torch.ones(2), (ROWS, 4))
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [5, 9]

    def test_what_it_reads_may_be_resized(self) -> None:
        """As torch does where it adds sparse gradients up."""
        model = embedding(sparse=True)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for step in range(4):
            rows = ids(step, step + 1)
            model(rows).sum().backward()
            optimizer.step()
            rows.resize_(100)
        assert taken(tracker) == [0, 1, 2, 3, 4]

    def test_arguments_may_be_given_by_name(self) -> None:
        model = embedding()
        tracker = tracker_of(model)
        model(input=ids(4))
        assert taken(tracker) == [4]

    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    def test_bags(self, mode: str) -> None:
        model = nn.EmbeddingBag(ROWS, 4, mode=mode, padding_idx=2)
        tracker = tracker_of(model)
        before = model.weight.detach().clone()
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer, ids(2, 5, 9, 5), ids(0, 2))
        optimizer.zero_grad()
        noted = taken(tracker)
        differing = torch.nonzero((before != model.weight).any(1)).squeeze(1).tolist()
        assert set(differing) == {5, 9}
        assert set(differing) <= set(noted)
        assert set(noted) <= {2, 5, 9}

    def test_padding(self) -> None:
        model = embedding(padding_idx=0)
        tracker = tracker_of(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        train(model, optimizer, ids(0, 1))
        optimizer.zero_grad()
        assert torch.equal(before[0], model.weight[0])
        assert 1 in taken(tracker)

    def test_one_table_in_two_modules(self) -> None:
        model = nn.ModuleList([embedding(), embedding()])
        model[1].weight = model[0].weight
        tracker = tracker_of(model)
        assert list(tracker.tables) == ["0.weight"]
        model[0](ids(1))
        model[1](ids(2))
        assert taken(tracker, "0.weight") == [1, 2]

    def test_one_module_under_two_names(self) -> None:
        model = nn.ModuleDict({"a": embedding()})
        model["b"] = model["a"]
        tracker = tracker_of(model)
        assert list(tracker.tables) == ["a.weight"]
        model["b"](ids(2))
        assert taken(tracker, "a.weight") == [2]

    def test_without_gradients_nothing_is_noted(self) -> None:
        model = embedding()
        tracker = tracker_of(model)
        with torch.no_grad():
            model(ids(1))
        with torch.inference_mode():
            model(ids(2))
        model.requires_grad_(requires_grad=False)
        model(ids(3))
        assert taken(tracker) == []

    def test_activation_checkpointing(self) -> None:
        model = embedding()
        tracker = tracker_of(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        for reentrant in (False, True):
            scale = torch.ones(1, requires_grad=True)
            looked_up = torch.utils.checkpoint.checkpoint(
                lambda rows, scale: model(rows) * scale, ids(5), scale, use_reentrant=reentrant
            )
            looked_up.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert taken(tracker) == [5]

    @pytest.mark.parametrize("train_mode", [True, False])
    def test_renormalizing_changes_rows_in_evaluation_too(self, train_mode: bool) -> None:
        model = embedding(max_norm=0.1)
        tracker = tracker_of(model)
        before = model.weight.detach().clone()
        model.train(train_mode)
        with torch.no_grad():
            model(ids(6, 8))
        assert not torch.equal(before[[6, 8]], model.weight[[6, 8]])
        assert taken(tracker) == [6, 8]

    def test_renormalizing_does_not_hide_other_writes(self) -> None:
        model = embedding(max_norm=0.1)
        tracker = tracker_of(model)
        with torch.no_grad():
            model.weight[3] += 1
            model(ids(6))
        assert taken(tracker) == "it was written to outside of an optimizer step"

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiled_models(self, backend: str) -> None:
        model = nn.Sequential(embedding(), nn.Linear(4, 1))
        tracker = tracker_of(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend=backend)
        for row in range(20):
            train(compiled, optimizer, ids(row, row + 1))  # type: ignore[arg-type]
        optimizer.zero_grad()
        assert taken(tracker, "0.weight") == list(range(21))
        torch.compiler.reset()

    def test_exported_models_know_nothing_of_it(self) -> None:
        model = embedding()
        tracker = tracker_of(model)
        with pytest.warns(DeprecationWarning, match=r"torch\.jit\.trace"):
            traced = torch.jit.trace(model, (ids(1, 2),))  # type: ignore[no-untyped-call]
        assert torch.equal(traced(ids(3, 4)), model.weight[[3, 4]])
        exported = torch.export.export(model, (ids(1, 2),))
        assert torch.equal(exported.module()(ids(3, 4)), model.weight[[3, 4]])
        assert taken(tracker) == []


class TestSteps:
    """Rows whose change is yet to come stay noted."""

    @pytest.mark.parametrize("sparse", [False, True])
    def test_accumulation_across_a_snapshot(self, sparse: bool) -> None:
        model = embedding(sparse=sparse)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for row in (1, 2):
            model(ids(row)).sum().backward()
        assert taken(tracker) == [1, 2]
        model(ids(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [1, 2, 3]
        assert taken(tracker) == []

    def test_a_graph_across_a_snapshot(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        loss = model(ids(1)).sum()
        assert taken(tracker) == [1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [1]

    def test_gradients_that_outlive_a_step(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        train(model, optimizer, ids(1))
        assert taken(tracker) == [1]
        model(ids(2)).sum().backward()  # no zero_grad: row 1 moves again
        before = model.weight[1].detach().clone()
        optimizer.step()
        assert not torch.equal(before, model.weight[1])
        assert taken(tracker) == [1, 2]

    def test_many_steps(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for step in range(600):
            train(model, optimizer, ids(step % 3))
        model(ids(9))
        optimizer.zero_grad()
        assert taken(tracker) == [0, 1, 2, 9]
        assert taken(tracker) == [9]

    def test_an_exception_between_forward_and_step(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)

        def failing() -> None:
            model(ids(1)).sum().backward()
            raise ValueError

        with pytest.raises(ValueError):
            failing()
        assert taken(tracker) == [1]
        optimizer.step()  # somebody goes on all the same
        optimizer.zero_grad()
        assert taken(tracker) == [1]

    def test_a_closure(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(ids(4)).sum()
            loss.backward()
            return float(loss.item())

        optimizer.step(closure)
        optimizer.zero_grad()
        assert taken(tracker) == [4]
        assert taken(tracker) == []

    def test_a_failing_forward(self) -> None:
        model = embedding()
        tracker = tracker_of(model)
        with pytest.raises(IndexError):
            model(ids(ROWS))
        assert taken(tracker) == []

    def test_gradients_from_before_the_hooks(self) -> None:
        model = embedding()
        optimizer = SGD(model.parameters(), lr=0.1)
        model(ids(4)).sum().backward()
        tracker = tracker_of(model)
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [4]

    def test_put_back(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        train(model, optimizer, ids(1))
        optimizer.zero_grad()
        failed = take(tracker)
        train(model, optimizer, ids(2))
        optimizer.zero_grad()
        tracker.put_back(failed)
        assert taken(tracker) == [1, 2]
        tracker.tables["weight"].mark_all("why")
        failed = take(tracker)
        tracker.put_back(failed)
        assert taken(tracker) == "why"


class TestOtherHooksOnSteps:
    """What they and closures do is told from what the optimizer does."""

    @pytest.mark.parametrize("sparse", [False, True])
    @pytest.mark.parametrize("where", ["before", "after", "closure", "named closure"])
    @pytest.mark.parametrize("first", [False, True])
    def test_they_write(self, sparse: bool, where: str, first: bool) -> None:
        model = embedding(sparse=sparse)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)

        def project(*_: object) -> None:
            with torch.no_grad():
                model.weight[:3].mul_(0.5)

        def closure() -> Any:
            optimizer.zero_grad()
            project()
            loss: Any = model(ids(5)).sum()
            loss.backward()
            return loss

        if not first:
            train(model, optimizer, ids(4))
            optimizer.zero_grad()
            assert taken(tracker) == [4]
        if where == "before":
            optimizer.register_step_pre_hook(project)
        elif where == "after":
            optimizer.register_step_post_hook(project)
        if where == "closure":
            optimizer.step(closure)
        elif where == "named closure":
            optimizer.step(closure=closure)
        else:
            train(model, optimizer, ids(5))
        optimizer.zero_grad()
        assert taken(tracker) == "it was written to outside of an optimizer step"

    @pytest.mark.parametrize("sparse", [False, True])
    @pytest.mark.parametrize("first", [False, True])
    def test_they_forget_the_gradient(self, sparse: bool, first: bool) -> None:
        model = embedding(sparse=sparse)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        if not first:
            train(model, optimizer, ids(4))
            optimizer.zero_grad()
            assert taken(tracker) == [4]
        optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        (model(ids(5)).sum() + functional.embedding(ids(6), model.weight, sparse=sparse).sum()).backward()
        optimizer.step()
        assert taken(tracker) == [5, 6]

    def test_a_closure_that_only_trains(self) -> None:
        model = embedding(max_norm=1.0)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        losses: list[Any] = []

        def closure() -> Any:
            optimizer.zero_grad()
            losses.append(model(ids(5)).sum())
            losses[-1].backward()
            return losses[-1]

        assert optimizer.step(closure) is losses[0]
        assert optimizer.step(closure=closure) is losses[1]
        optimizer.zero_grad()
        assert taken(tracker) == [5]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
    def test_a_step_that_is_compiled(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), torch.optim.Adagrad(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager")
        for rows in ([4, 5], [6, 7]):
            for row in rows:
                optimizer.zero_grad()
                (model(ids(row)).sum() + functional.embedding(ids(row + 10), model.weight).sum()).backward()
                step()
            optimizer.zero_grad()
            assert taken(tracker) == [*rows, *(row + 10 for row in rows)]

    def test_they_are_taken_off(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        train(model, optimizer, ids(4))
        held = [optimizer.__dict__[f"_optimizer_step_{when}_hooks"] for when in ("pre", "post")]
        assert [len(hooks) for hooks in held] == [1, 1]
        copy.deepcopy((model, optimizer))
        tracker.close()
        assert [len(hooks) for hooks in held] == [0, 0]
        train(model, optimizer, ids(4))

    def test_they_keep_nothing_alive(self) -> None:
        model = embedding()
        optimizer = SGD(model.parameters(), lr=0.1)
        tracker = weakref.ref(tracker_of(model))
        train(model, optimizer, ids(4))
        gc.collect()
        assert tracker() is None
        train(model, optimizer, ids(4))


class TestWholeTables:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (torch.optim.Adam, "Adam changes the state of every row in each step"),
            (torch.optim.AdamW, "AdamW changes the state of every row in each step"),
            (torch.optim.RMSprop, "RMSprop changes the state of every row in each step"),
            (lambda p: SGD(p, lr=0.1, weight_decay=0.1), "SGD: weight decay moves every row"),
            (lambda p: SGD(p, lr=0.1, momentum=0.9), "SGD: momentum moves rows of earlier batches"),
            (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "Adagrad: weight decay moves every row"),
            (lambda p: type("Mine", (SGD,), {})(p, lr=0.1), "Mine is not known to leave rows without gradient"),
        ],
        ids=["Adam", "AdamW", "RMSprop", "decay", "momentum", "Adagrad decay", "unknown"],
    )
    def test_optimizers_that_move_other_rows(self, make: Callable[[Any], torch.optim.Optimizer], reason: str) -> None:
        model = embedding()
        optimizer = make(model.parameters())
        tracker = tracker_of(model, optimizer=optimizer)
        train(model, optimizer, ids(1))
        told = taken(tracker)
        assert isinstance(told, str)
        assert told.startswith(reason)
        assert taken(tracker) == [1], "no step since, but its gradient is still there"

    def test_momentum_from_a_later_step_on(self) -> None:
        model = embedding()
        optimizer = SGD(model.parameters(), lr=0.1)
        tracker = tracker_of(model, optimizer=optimizer)
        train(model, optimizer, ids(1))
        assert taken(tracker) == [1]
        optimizer.param_groups[0]["momentum"] = 0.5
        train(model, optimizer, ids(2))
        assert taken(tracker) == "SGD: momentum moves rows of earlier batches"

    @pytest.mark.parametrize(
        "write",
        [
            lambda m: m.load_state_dict(m.state_dict()),
            lambda m: m.weight.detach().add_(1),
            lambda m: nn.init.zeros_(m.weight),
            lambda m: setattr(m.weight, "data", torch.ones(ROWS, 4)),
            lambda m: m.half().float(),
        ],
        ids=["load_state_dict", "detached", "init", "data", "dtype"],
    )
    def test_writes_outside_of_steps(self, write: Callable[[nn.Module], None]) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        write(model)
        train(model, optimizer, ids(1))
        assert taken(tracker) == "it was written to outside of an optimizer step"
        optimizer.zero_grad()
        assert taken(tracker) == [1] or taken(tracker) == []

    def test_writes_to_the_state(self) -> None:
        model = embedding()
        optimizer = torch.optim.Adagrad(model.parameters())
        tracker = tracker_of(model, optimizer=optimizer)
        train(model, optimizer, ids(1))
        assert taken(tracker) == [1]
        optimizer.state[model.weight]["sum"].zero_()
        assert taken(tracker) == "it was written to outside of an optimizer step"

    def test_an_optimizer_that_nobody_named(self) -> None:
        """Steps of every optimizer of the process are seen."""
        model = embedding()
        tracker = tracker_of(model)
        train(model, torch.optim.Adagrad(model.parameters()), ids(2))
        assert taken(tracker) == [2]

    @pytest.mark.parametrize("rows", [ROWS + 5, 10])
    def test_another_number_of_rows(self, rows: int) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        train(model, optimizer, ids(2, 40))
        optimizer.zero_grad()
        failed = take(tracker)
        model.weight.data = torch.ones(rows, 4)
        train(model, optimizer, ids(rows - 1))
        optimizer.zero_grad()
        assert taken(tracker) == "it has another number of rows"
        tracker.put_back(failed)
        tracker.tables["weight"].mark(ids(rows - 1))
        assert taken(tracker) == [row for row in (2, 40) if row < rows] + [rows - 1]
        with pytest.raises(InvalidInputError, match=f"row {rows} is not in a table of {rows} rows"):
            tracker.tables["weight"].mark(ids(rows))

    def test_no_rows(self) -> None:
        model = nn.Embedding(0, 4)
        tracker = tracker_of(model)
        model.weight.grad = torch.zeros(0, 4)
        assert taken(tracker) == []

    def test_memory_that_processes_share(self) -> None:
        model = embedding().share_memory()
        tracker = tracker_of(model)
        assert taken(tracker) == "it is in memory that other processes share, which may train it as well"

    def test_transforms_of_functions(self) -> None:
        """They may not write to what is outside; what they looked up is not known."""
        model = embedding()
        tracker = tracker_of(model)
        given = {"weight": model.weight.detach()}

        def loss(weights: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.func.functional_call(model, weights, (rows,)).sum()
            return found

        gradient = torch.func.grad(loss)(given, ids(1, 2))["weight"]
        assert gradient.sum(1).nonzero().flatten().tolist() == [1, 2]
        reason = "it was looked up within a transform of torch.func"
        assert taken(tracker) == reason
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(given, ids(3, 4)[:, None])["weight"]
        assert each.sum(2).nonzero().tolist() == [[0, 3], [1, 4]]
        assert taken(tracker) == reason
        rows = torch.func.functionalize(model)(ids(6))
        assert torch.equal(rows, model.weight[6:7])
        assert taken(tracker) == reason
        model(ids(5))
        assert taken(tracker) == [5]


class TestPastTheHooks:
    def test_gradients_of_other_rows_in_the_same_memory(self) -> None:
        """The gradient of an `nn.EmbeddingBag` lies on its ids: another's rows are noted, and altered ones."""
        model = nn.EmbeddingBag(100, 4, mode="sum", sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker = Tracker(find_tables(model))
        noted = tracker.tables["weight"]
        ids = torch.tensor([[1, 2], [3, 4]])
        model(ids).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad._indices().data_ptr() == ids.data_ptr()
        ids[0, 0] = 50  # so does the gradient, whose rows these are
        optimizer.step()
        assert noted.changed().rows.tolist() == [1, 2, 3, 4, 50]
        for number in range(8):  # forwards whose ids are gone, and lookups past the hooks at the same place
            model(torch.tensor([[10, 11], [12, 13]]))
            model.weight.grad = None
            others = torch.tensor([[20, 21], [22, 60 + number]])
            past: Any = functional.embedding_bag(others, model.weight, mode="sum", sparse=True).sum()
            past.backward()
            optimizer.step()
        found = noted.changed()
        assert set(found.rows.tolist()) >= {20, 21, 22, *range(60, 68)} and found.whole is None
        tracker.close()

    @pytest.mark.parametrize("sparse", [False, True])
    @pytest.mark.parametrize("size", ["small", "large"])
    def test_a_functional_lookup_now_and_then(self, sparse: bool, size: str, request: pytest.FixtureRequest) -> None:
        if size == "large":
            request.getfixturevalue("large")
        model = embedding(sparse=sparse)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for step in range(1, 20):
            optimizer.zero_grad()
            model(ids(1)).sum().backward()
            if step == 10:
                look_up(model, ids(2, 3), sparse=sparse)
            optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [1, 2, 3]

    @pytest.mark.usefixtures("large")
    @pytest.mark.parametrize(
        ("rows", "train"),
        [
            ([1], lambda m: m(ids(1)).sum().backward()),
            ([1, 2], lambda m: (m(ids(1)).sum() + m(ids(2)).square().sum()).backward()),
            ([1, 2], lambda m: (functional.embedding(ids(2), m.weight).sum() + m(ids(1)).sum()).backward()),
            ([1, 2], lambda m: (m(ids(1)).sum() + functional.embedding(ids(2), m.weight).sum()).backward()),
            (
                [1, 2, 3],
                lambda m: (
                    m(ids(1)).sum() + m(ids(3)).mean() + functional.embedding(ids(2), m.weight).sum()
                ).backward(),
            ),
            (range(ROWS), lambda m: (m(ids(1)).sum() + m.weight.square().sum()).backward()),
            (range(ROWS), lambda m: (m(ids(1)).sum().backward(), m.weight.grad.add_(1e-3))),
            ([1], lambda m: (m(ids(1)).sum().backward(), nn.utils.clip_grad_norm_(m.parameters(), 0.1))),
            ([1, 2], lambda m: (m(ids(1)).sum().backward(), m(ids(2)).sum().backward())),
            ([1, 2], lambda m: (m(ids(1)).sum().backward(), look_up(m, ids(2)))),
            ([1, 2], lambda m: (look_up(m, ids(2)), m(ids(1)).sum().backward())),
            (
                [1, 2, 3],
                lambda m: (
                    m(ids(1)).sum().backward(),
                    (m(ids(3)).sum() + functional.embedding(ids(2), m.weight).sum()).backward(),
                ),
            ),
            ([1, 2], lambda m: (m(ids(1)).sum().backward(), m.zero_grad(), look_up(m, ids(2)))),
        ],
    )
    def test_a_large_gradient_that_is_not_of_modules_alone(self, rows: Any, train: Callable[[Any], Any]) -> None:
        """Long after a snapshot, and in a single step."""
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for step in range(20):
            optimizer.zero_grad()
            if step == 10:
                train(model)
            else:
                model(ids(1)).sum().backward()
            before = model.weight.detach().clone()
            optimizer.step()
            if step == 10:
                assert set((model.weight != before).any(1).nonzero().flatten().tolist()) <= set(rows)
        optimizer.zero_grad()
        assert taken(tracker) == list(rows)

    @pytest.mark.usefixtures("large")
    @pytest.mark.parametrize("make", [embedding, lambda: nn.EmbeddingBag(ROWS, 4)])
    def test_what_modules_alone_made_is_not_looked_through(
        self, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = make()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            train(model, optimizer, ids(1)[None])
        monkeypatch.setattr(tracking, "reached", None)
        monkeypatch.setattr(tracking, "gradient_rows", None)
        for row in (2, 3):
            optimizer.zero_grad()
            (model(ids(row)[None]).sum() + model(ids(row + 2)[None]).square().sum()).backward()
            optimizer.step()
        monkeypatch.undo()
        optimizer.zero_grad()
        assert taken(tracker) == [1, 2, 3, 4, 5]

    @pytest.mark.usefixtures("large")
    def test_a_gradient_written_to_through_data(self) -> None:
        """Autograd does not count that; it is found soon after a snapshot."""
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        model(ids(1)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.data[2] = 1
        with pytest.warns(TrackingWarning, match="a gradient reached row 2 "):
            optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == "gradients reached rows past the hooks"
        model(ids(1)).sum().backward()
        model.weight.grad.data[5] = 1
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [1, 5]

    @pytest.mark.usefixtures("large")
    def test_another_tensor_where_the_gradient_of_a_lookup_was(self) -> None:
        """As the allocator gives it the memory of one that is gone: here a hook puts it there."""
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            train(model, optimizer, ids(1))
        more = torch.zeros(ROWS, 4)
        more[7] = 1
        model.weight.register_hook(lambda gradient: gradient.data.add_(more))  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        (model(ids(2)).sum() + model(ids(3)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [1, 2, 3, 7]

    @pytest.mark.usefixtures("large")
    def test_a_gradient_that_is_given_other_memory(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            train(model, optimizer, ids(1))
        optimizer.zero_grad()
        model(ids(2)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.data = torch.eye(ROWS, 4)
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [0, 1, 2, 3]

    @pytest.mark.usefixtures("large")
    def test_a_gradient_that_is_put_aside_over_a_snapshot(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(ids(2)).sum().backward()
        aside, model.weight.grad = model.weight.grad, None
        optimizer.step()
        assert taken(tracker) == [2]
        for _ in range(5):
            optimizer.step()
        model.weight.grad = aside
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [2]

    @pytest.mark.usefixtures("large")
    def test_a_backward_that_makes_a_graph(self) -> None:
        """Its gradients are not added up in place, so that memory of some is used for others."""
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            train(model, optimizer, ids(1))
        optimizer.zero_grad()
        loss = (model(ids(2)).square() + model(ids(3)).square() + functional.embedding(ids(4), model.weight)).sum()
        inner = torch.autograd.grad(loss, model.weight, create_graph=True)[0].square().sum()
        with warnings.catch_warnings(action="ignore"):
            (loss + inner).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [1, 2, 3, 4]

    @pytest.mark.usefixtures("large")
    def test_it_is_found_at_a_snapshot_at_the_latest(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            train(model, optimizer, ids(1))
        optimizer.zero_grad()
        model(ids(1)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.data[2] = 1
        optimizer.step()
        with pytest.warns(TrackingWarning, match="row 2 "):
            assert taken(tracker) == "gradients reached rows past the hooks"

    @pytest.mark.parametrize("sparse", [False, True])
    def test_a_graph_across_a_step_and_a_snapshot(self, sparse: bool) -> None:
        """Two losses of one batch, a step for each, and a save between them."""
        model = embedding(sparse=sparse)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        losses = [model(ids(row)).sum() for row in (1, 2)]
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            noted = taken(tracker)
        assert noted == [2]

    def test_a_gradient_on_ids_noted_before_a_step_and_a_snapshot(self) -> None:
        """It lies where they do, but they are not noted any more."""
        model = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        loss = model(torch.tensor([[1, 2]])).sum()
        optimizer.step()
        assert taken(tracker) == [1, 2]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [1, 2]

    @pytest.mark.usefixtures("large")
    def test_a_graph_across_a_step_and_a_snapshot_of_a_large_table(self) -> None:
        model = embedding()
        tracker, optimizer = tracker_of(model), SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            train(model, optimizer, ids(0))
        losses = [model(ids(row)).sum() for row in (1, 2)]
        losses[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [0, 1, 2]
        for _ in range(10):
            train(model, optimizer, ids(3))
        optimizer.zero_grad()
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        assert taken(tracker) == [2, 3]

    def test_tied_weights_are_refused(self) -> None:
        model = nn.ModuleDict({"in": embedding(), "out": nn.Linear(4, ROWS, bias=False)})
        model["out"].weight = model["in"].weight
        with pytest.raises(InvalidInputError, match=r"table 'in\.weight' is tied to 'out\.weight', which is no lookup"):
            tracker_of(model)
        assert list(tracker_of(model, {"in.weight": "dense"}).tables) == []
        tracker = tracker_of(model, {"out.weight": "all"})
        assert taken(tracker, "in.weight") == "tables= says that any row may change"
        assert taken(tracker, "in.weight") == "tables= says that any row may change"

    def test_a_forward_of_its_own_is_refused(self) -> None:
        class Hashed(nn.Embedding):
            def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
                return super().forward(input % ROWS)

        with pytest.raises(InvalidInputError, match="no known module looks its rows up"):
            tracker_of(Hashed(ROWS, 4))

    def test_a_subclass_with_the_same_forward(self) -> None:
        model = type("Named", (nn.Embedding,), {})(ROWS, 4)
        tracker = tracker_of(model)
        model(ids(1))
        assert taken(tracker) == [1]

    def test_a_plain_parameter_with_marks(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.ones(ROWS, 4))

            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return functional.embedding(rows, self.table)

        model = Model()
        assert list(tracker_of(model).tables) == []
        with pytest.raises(InvalidInputError, match="no known module looks its rows up"):
            tracker_of(model, ["table"])
        tracker, optimizer = tracker_of(model, {"table": "marked"}), SGD(model.parameters(), lr=0.1)
        tracker.tables["table"].mark(ids(4))
        train(model, optimizer, ids(4))
        optimizer.zero_grad()
        assert taken(tracker, "table") == [4]
        train(model, optimizer, ids(5))
        assert taken(tracker, "table") == [5], "by its gradient"

    def test_parametrized_tables_are_dense(self) -> None:
        model = embedding()
        torch.nn.utils.parametrizations.weight_norm(model)
        assert find_tables(model) == []


class TestChoice:
    def test_names(self) -> None:
        model = nn.ModuleDict({"a": embedding(), "b": nn.Sequential(embedding())})
        assert [t.name for t in find_tables(model)] == ["a.weight", "b.0.weight"]
        assert [t.name for t in find_tables(model, ["b.0.weight"])] == ["b.0.weight"]
        assert [t.name for t in find_tables(model, {"b.0.weight": "dense"})] == ["a.weight"]
        assert find_tables(model, []) == []

    @pytest.mark.parametrize(
        ("tables", "match"),
        [
            (["x.weight"], "the model has no parameter 'x.weight'; its embeddings: a.weight"),
            ("a.weight", "give a list of names"),
            ({"a.weight": "some"}, "'some'; one of lookups, marked, all, dense"),
        ],
    )
    def test_refused(self, tables: Any, match: str) -> None:
        with pytest.raises(InvalidInputError, match=match):
            find_tables(nn.ModuleDict({"a": embedding()}), tables)

    @pytest.mark.parametrize(
        ("rows", "match"), [([ROWS], "row 50 is not in a table of 50 rows"), ([-1], "row -1"), ([0.5], "float32")]
    )
    def test_marks_are_checked(self, rows: Iterable[float], match: str) -> None:
        with pytest.raises(InvalidInputError, match=match):
            tracker_of(embedding()).tables["weight"].mark(torch.tensor(rows))


class TestHooks:
    def test_a_copy_of_the_model_notes_nothing(self) -> None:
        model = embedding()
        tracker = tracker_of(model)
        copied = copy.deepcopy(model)
        copied(ids(1))
        assert taken(tracker) == []
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.load(file, weights_only=False)(ids(2))
        assert taken(tracker) == []
        model(ids(3))
        assert taken(tracker) == [3]

    def test_after_close_nothing_is_noted(self) -> None:
        model = embedding()
        tracker = tracker_of(model)
        tracker.close()
        train(model, SGD(model.parameters(), lr=0.1), ids(1))
        assert not model._forward_hooks
        assert tracker.tables["weight"].bitmap.sum() == 0

    def test_the_bitmap_takes_a_byte_a_row(self) -> None:
        model = nn.Embedding(1000, 64)
        bitmap = tracker_of(model).tables["weight"].bitmap
        assert bitmap.nbytes * 256 == model.weight.nbytes

    def test_random_training_misses_nothing(self) -> None:
        random = np.random.default_rng(0)
        for sparse in (False, True):
            model = embedding(sparse=sparse)
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
            tracker = tracker_of(model, optimizer=optimizer)
            stored = model.weight.detach().clone()
            for step in range(200):
                rows = torch.from_numpy(random.integers(0, ROWS, 3))
                model(rows).square().sum().backward()
                if random.random() < 0.5:
                    optimizer.step()
                if random.random() < 0.3:
                    optimizer.zero_grad()
                if random.random() < 0.2:
                    rows = take(tracker)["weight"].rows
                    stored[rows] = model.weight.detach()[rows]
                    assert torch.equal(stored, model.weight), step


class TestGradients:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("columns", [0, 1, 3, 4])
    def test_rows_that_one_reaches(self, dtype: torch.dtype, columns: int) -> None:
        gradient = torch.zeros(40, columns, dtype=dtype)
        gradient[3] = -0.0
        gradient[5:7, columns // 2 :] = 1e-7
        gradient[9] = torch.nan
        gradient[39, columns - 1 :] = -1
        expected = (gradient != 0).any(1)
        assert torch.equal(gradients.reached(gradient), expected)
        assert torch.equal(gradients.reached(gradient.T.contiguous().T), expected)
        assert expected.nonzero().flatten().tolist() == ([5, 6, 9, 39] if columns else [])

    def test_rows_of_one_value(self) -> None:
        assert gradients.reached(torch.tensor([0.0, 2.0, -0.0])).tolist() == [False, True, False]
