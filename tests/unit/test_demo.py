"""The parts of `checkrun demo`: its text, its training, its folder, its page."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import checkrun_format as crf
from checkrun_format.cli import main
from checkrun_format.cli._demo import page, snapshot
from checkrun_format.cli._demo.corpus import Corpus, Ids, read_corpus
from checkrun_format.cli._demo.folder import Folder, FolderError
from checkrun_format.cli._demo.report import Line, Report, identical, relative_errors
from checkrun_format.cli._demo.skipgram import Embedding, gradients, windows
from checkrun_format.cli._demo.trainer import Reader, Trainer

TOPICS = {"b": "To be, or not to be", "a": "be it", "empty": "42 !"}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


class TestCorpus:
    def test_numbers_words_and_pairs_by_frequency(self) -> None:
        corpus = read_corpus(TOPICS)
        assert [corpus.names[row] for row in corpus.word_at] == ["be", "it", "to", "be", "or", "not", "to", "be"]
        assert [corpus.names[row] for row in corpus.pair_at] == [
            "be", "be it", "to", "to be", "be or", "or not", "not to", "to be",
        ]  # fmt: skip
        assert corpus.topic_at.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
        assert corpus.names[: corpus.words] == ("be", "to", "it", "or", "not")
        assert corpus.counts.tolist() == [3, 2, 1, 1, 1]
        assert corpus.names[corpus.words] == "to be"

    def test_a_pair_never_takes_the_row_of_a_word(self) -> None:
        corpus = read_corpus(TOPICS)
        assert corpus.pair_at.min() == corpus.words
        assert corpus.pair_at.max() == len(corpus.names) - 1

    def test_the_digest_tells_texts_apart(self) -> None:
        assert read_corpus(TOPICS).digest() == read_corpus(dict(reversed(TOPICS.items()))).digest()
        assert read_corpus(TOPICS).digest() != read_corpus(TOPICS | {"c": "or"}).digest()

    def test_this_python_has_enough_text(self, corpus: Corpus) -> None:
        assert 40_000 < len(corpus.word_at) < 200_000
        assert 20_000 < len(corpus.names) < 60_000
        assert corpus.counts[0] > 2_000
        assert np.mean(corpus.counts <= 2) > 0.3


class TestWindows:
    def slow(self, topic_at: Ids, reaches: Ids, first: int) -> list[tuple[int, int]]:
        found = []
        for center, reach in enumerate(reaches.tolist(), first):
            left = range(center - 1 - reach, center - 1)
            right = range(center + 1, center + reach + 1)
            found += [(center, p) for p in (*left, *right) if 0 <= p < len(topic_at)]
        return [(center, p) for center, p in found if topic_at[center] == topic_at[p]]

    @pytest.mark.parametrize(("first", "count"), [(0, 8), (0, 1), (3, 4), (7, 1)])
    def test_equal_a_loop(self, first: int, count: int) -> None:
        topic_at = read_corpus(TOPICS).topic_at
        centers = np.arange(first, first + count)
        for seed in range(20):
            reaches = np.random.default_rng(seed).integers(1, 5, count)
            found = windows(topic_at, centers, reaches, most=4)
            center, column = np.nonzero(found.used)
            pairs = zip((center + first).tolist(), found.contexts[center, column].tolist(), strict=True)
            assert list(pairs) == self.slow(topic_at, reaches, first)


class TestGradients:
    def test_equal_finite_differences(self) -> None:
        random: Any = np.random.default_rng(1)
        hidden, contexts, negatives = (random.normal(size=shape) for shape in ((3, 4), (3, 5, 4), (6, 4)))
        used = random.random((3, 5)) < 0.6

        def loss() -> float:
            return gradients(hidden, contexts, used, negatives, per_pair=2.0).loss

        found = gradients(hidden, contexts, used, negatives, per_pair=2.0)
        full = np.zeros_like(contexts)
        full[used] = found.contexts
        for array, gradient in ((hidden, found.hidden), (contexts, full), (negatives, found.negatives)):
            for place in np.ndindex(array.shape):
                kept = array[place]
                array[place] = kept + 1e-4
                above = loss()
                array[place] = kept - 1e-4
                numeric = (above - loss()) / 2e-4
                array[place] = kept
                assert gradient[place] == pytest.approx(numeric, abs=1e-5)


class TestEmbedding:
    def test_adds_up_repeated_rows_and_keeps_one_sum_a_row(self) -> None:
        table = Embedding(np.zeros((4, 2), np.float32), np.zeros(4, np.float32))
        steps = np.array([[1, 0], [3, 4], [2, 0]], np.float32)
        table.descend(np.array([2, 0, 2]), steps, 0.5)
        assert table.sum.tolist() == [12.5, 0, 4.5, 0]
        np.testing.assert_allclose(table.weight[0], -0.5 * np.array([3, 4]) / np.sqrt(12.5), rtol=1e-6)
        np.testing.assert_allclose(table.weight[2], -0.5 * np.array([3, 0]) / np.sqrt(4.5), rtol=1e-6)
        assert table.take_changed().tolist() == [True, False, True, False]
        assert not table.take_changed().any()


class TestTrainer:
    def test_learns(self, corpus: Corpus) -> None:
        trainer = Trainer(corpus)
        assert trainer.loss() == pytest.approx(6 * np.log(2), abs=1e-3)
        losses = [trainer.train() for _ in range(400)]
        assert 3.0 < np.mean(losses[-50:]) < np.mean(losses[:50]) < 4.2
        assert 2.9 < trainer.loss() < 3.6

    def test_an_interval_changes_some_of_the_rows(self, corpus: Corpus) -> None:
        trainer = Trainer(corpus)
        for _ in range(200):
            trainer.train()
        changed = trainer.inputs.take_changed()
        assert 0.15 < changed.mean() < 0.35
        touched = trainer.inputs.sum > 0
        assert np.array_equal(touched, changed)

    def test_goes_on_bit_for_bit_from_a_position(self, corpus: Corpus) -> None:
        straight = Trainer(corpus)
        for _ in range(30):
            straight.train()
        resumed = Trainer(corpus, seed=99)
        resumed.go_to(json.loads(json.dumps(straight.position())))
        for mine, other in ((resumed.inputs, straight.inputs), (resumed.outputs, straight.outputs)):
            mine.weight[:], mine.sum[:] = other.weight, other.sum
        resumed.projection[:], resumed.projection_sum[:] = straight.projection, straight.projection_sum
        assert [straight.train() for _ in range(30)] == [resumed.train() for _ in range(30)]
        assert identical(straight.inputs.weight, resumed.inputs.weight)
        assert identical(straight.outputs.sum, resumed.outputs.sum)
        assert identical(straight.projection, resumed.projection)
        assert straight.position() == resumed.position()

    def test_the_reader_starts_over_at_the_end(self) -> None:
        reader = Reader(position=6)
        assert reader.take(4, 8).tolist() == [6, 7]
        assert (reader.position, reader.epoch) == (0, 1)
        assert reader.take(4, 8).tolist() == [0, 1, 2, 3]

    def test_the_position_has_no_number_that_json_readers_round(self, corpus: Corpus) -> None:
        def numbers(value: object) -> list[int]:
            if isinstance(value, dict):
                return [number for inner in value.values() for number in numbers(inner)]
            return [value] if isinstance(value, int) else []

        assert numbers(Trainer(corpus).position())
        assert max(numbers(Trainer(corpus).position())) < 2**53


class TestSnapshot:
    def trained(self, corpus: Corpus, steps: int) -> Trainer:
        trainer = Trainer(corpus)
        for _ in range(steps):
            trainer.train()
        return trainer

    def test_names_the_rows_changed_since_the_last_one(self, corpus: Corpus) -> None:
        trainer = self.trained(corpus, 3)
        before = trainer.inputs.sum.copy()
        state, changed = snapshot.take(trainer)
        assert changed == np.count_nonzero(before) + np.count_nonzero(trainer.outputs.sum)
        assert np.array_equal(np.asarray(state.tables["in"].changed), before > 0)
        trainer.train()
        changed_since = snapshot.take(trainer)[0].tables["in"].changed
        assert np.array_equal(np.asarray(changed_since), trainer.inputs.sum != before)

    def test_training_goes_on_bit_for_bit_from_an_unquantized_run(self, corpus: Corpus, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, mode="a")
        straight = self.trained(corpus, 10)
        run.save(snapshot.take(straight)[0])
        for _ in range(10):
            straight.train()
        run.save(snapshot.take(straight)[0])
        resumed = Trainer(corpus, seed=99)
        snapshot.put_back(resumed, crf.open_run(tmp_path, mode="a").restore())
        assert not resumed.inputs.changed.any()
        assert [straight.train() for _ in range(20)] == [resumed.train() for _ in range(20)]
        ours, theirs = snapshot.arrays(straight), snapshot.arrays(resumed)
        assert len(ours) == 6
        assert [name for name in ours if not identical(ours[name], theirs[name])] == []


class TestFolder:
    def test_claims_a_new_and_an_empty_folder_and_its_own(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for path in (tmp_path / "deep/new", tmp_path / "empty"):
            Folder(path).claim("text")
            mark = (path / "demo.json").read_text()
            Folder(path).claim("text")
            assert (path / "demo.json").read_text() == mark
            assert json.loads(mark)["text"] == "text"

    def test_refuses_what_is_not_its_own(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("x")
        with pytest.raises(FolderError, match="holds something else"):
            Folder(tmp_path).claim("text")
        with pytest.raises(FolderError, match="is not a folder"):
            Folder(tmp_path / "thesis.tex").claim("text")
        with pytest.raises(FolderError, match=r"thesis\.tex/demo: Not a directory"):
            Folder(tmp_path / "thesis.tex/demo").claim("text")
        (tmp_path / "demo.json").write_text('{"kind": "other"}')
        with pytest.raises(FolderError, match="not written by checkrun demo"):
            Folder(tmp_path).claim("text")
        (tmp_path / "demo.json").write_text("[1]")
        with pytest.raises(FolderError, match="not written by checkrun demo"):
            Folder(tmp_path).claim("text")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "thesis.tex"]

    def test_refuses_the_text_of_another_python(self, tmp_path: Path) -> None:
        Folder(tmp_path).claim("text")
        with pytest.raises(FolderError, match=r"begun by Python 3\.\d+"):
            Folder(tmp_path).claim("other text")

    def test_keeps_events_and_outcomes(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path)
        assert folder.events("saved") == []
        assert folder.result() is None
        folder.note("saved", sequence=1)
        folder.note("killed", sequence=2)
        folder.note("saved", sequence=2)
        assert [event["sequence"] for event in folder.events("saved")] == [1, 2]
        folder.write_result({"loss": 1.5}, {"in.weight": np.arange(3)})
        assert folder.result() == {"loss": 1.5}
        assert folder.truth()["in.weight"].tolist() == [0, 1, 2]


def report(*, altered: tuple[str, ...] = ()) -> Report:
    saved = Line(
        sequence=1, kind="base", parent=None, step=200, changed=31_407, stored_rows=31_407,
        stored_bytes=1_300_000, plain_bytes=8_200_000, seconds=0.1234,
    )  # fmt: skip
    killed = Line(
        sequence=2, kind="killed", parent=None, step=400, changed=None, stored_rows=None,
        stored_bytes=5_000, plain_bytes=None, seconds=None,
    )  # fmt: skip
    again = Line(
        sequence=2, kind="increment", parent=1, step=400, changed=9_000, stored_rows=9_001,
        stored_bytes=300_000, plain_bytes=8_200_000, seconds=None,
    )  # fmt: skip
    return Report(
        lines=(saved, killed, again), rows=31_407, loss=2.02, loss_without_crash=2.0, loss_restored=2.04,
        error=0.0625, altered=altered, attempt="00000002/0123456789abcdef",
    )  # fmt: skip


def shown(made: Report, run: str = "demo/run") -> list[str]:
    stream = io.StringIO()
    page.show(made, Path(run), page.console(stream))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


class TestPage:
    def test_table(self) -> None:
        lines = shown(report())
        cells = [line.split() for line in lines[2:5]]
        assert cells[0] == ["1", "base", "-", "200", "31,407", "31,407", "1,300,000", "8,200,000", "0.12"]
        assert cells[1] == ["2", "killed", "-", "400", "-", "-", "5,000", "-", "-"]
        assert cells[2] == ["2", "increment", "1", "400", "9,000", "9,001", "300,000", "8,200,000", "-"]
        assert max(map(len, lines[:5])) <= 79

    def test_totals_leave_the_killed_save_out(self) -> None:
        text = "\n".join(shown(report()))
        assert "1,600,000 bytes for 2 checkpoints" in text
        assert "16,400,000 bytes, 10.2 times" in text
        assert "save 2 halfway. Its 5,000 bytes are litter" in text
        assert "error of a row 6.25% of its length" in text
        assert "with the crash: 2.0200. Without: 2.0000 (+1.00%)" in text
        assert "bit-identical to the trainer's." in text

    def test_says_so_when_something_lossless_changed(self) -> None:
        assert "NOT bit-identical to the trainer's: in.sum." in shown(report(altered=("in.sum",)))

    def test_a_pipe_gets_plain_lines(self) -> None:
        stream = io.StringIO()
        page.show(report(), Path("[red]x[/red]/" + "y" * 200), page.console(stream))
        assert {character for character in stream.getvalue() if not character.isprintable()} == {"\n"}
        assert stream.getvalue().isascii()
        assert stream.getvalue().count("[red]x[/red]/" + "y" * 200) == 6

    def test_a_narrow_terminal_still_gets_every_digit(self) -> None:
        stream = io.StringIO()
        on = page.console(stream)
        on.width = 40
        page.show(report(), Path("run"), on)
        assert [line.rstrip() for line in stream.getvalue().splitlines()][:5] == shown(report())[:5]

    def test_a_terminal_gets_colours(self) -> None:
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w") as stream:
            page.console(stream).print(page.table(report().lines))
        output = os.read(ours, 10_000)
        os.close(ours)
        assert b"\x1b[31m" in output


class TestComparison:
    def test_relative_errors(self) -> None:
        true = np.array([[3, 4], [0, 0], [0, 0]], np.float32)
        stored = np.array([[3, 4.5], [0, 0], [0, 1]], np.float32)
        assert relative_errors(stored, true).tolist() == [0.1, 0.0, np.inf]

    def test_identical_looks_at_bits(self) -> None:
        assert identical(np.array([np.nan]), np.array([np.nan]))
        assert not identical(np.array([0.0]), np.array([-0.0]))
        assert not identical(np.array([0.0]), np.array([0.0], np.float32))


class TestCommand:
    def test_help_documents_the_exit_codes(self) -> None:
        done = CliRunner().invoke(main, ["demo", "--help"])
        assert done.exit_code == 0
        for line in ("0    complete", "1    training failed", "2    DIR holds something else", "130  interrupted"):
            assert line in done.output

    def test_a_folder_with_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("x")
        done = CliRunner().invoke(main, ["demo", str(tmp_path)])
        assert done.exit_code == 2
        assert "holds something else" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_python_without_its_help_text_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
        done = CliRunner().invoke(main, ["demo", str(tmp_path / "new")])
        assert done.exit_code == 1
        assert "this Python was installed without its help text" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_option_is_a_usage_error(self) -> None:
        assert CliRunner().invoke(main, ["demo", "--bogus"]).exit_code == 2
