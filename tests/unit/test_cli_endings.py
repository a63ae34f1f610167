"""Exit codes, and one line for each error."""

from __future__ import annotations

import re
import warnings

import click
import pytest
from click.testing import CliRunner, Result

from checkrun_format import errors
from checkrun_format.cli.endings import Shell, code_of, conclude
from checkrun_format.cli.manual import CODES, epilog
from checkrun_format.manifest import Problem


def everything(kind: type[errors.CheckrunError]) -> list[type[errors.CheckrunError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in everything(child))]


def made(kind: type[errors.CheckrunError]) -> errors.CheckrunError:
    return kind("zarr.json", "it broke") if kind is errors.DamagedError else kind("it broke")


def ended(body: object) -> Result:
    """How a command ends that raises or warns."""

    @click.group(cls=Shell)
    def shell() -> None:
        pass

    @shell.command()
    def act() -> None:
        click.echo("before")
        if isinstance(body, BaseException):
            raise body
        assert callable(body)
        body()

    return CliRunner().invoke(shell, ["act"])


def test_every_kind_of_error_has_a_code() -> None:
    kinds = [kind for kind in everything(errors.CheckrunError) if kind is not errors.CheckrunError]
    kinds = [kind for kind in kinds if kind.__module__ == errors.__name__]
    assert len(kinds) >= 14
    codes = {kind.kind: code_of(made(kind)) for kind in kinds}
    assert codes == {
        "damaged": 1,
        "invalid_input": 2,
        **dict.fromkeys(("not_found", "run_not_found", "not_a_run", "checkpoint_not_found"), 3),
        **dict.fromkeys(("table_not_found", "row_not_found", "pruned", "burnt", "history_pruned"), 3),
        **dict.fromkeys(("unsupported_version", "unsupported_feature"), 4),
        **dict.fromkeys(("concurrent_commit", "rank_failed", "storage"), 5),
        **dict.fromkeys(("access_denied", "bucket_not_found", "credentials"), 5),
        "save_cancelled": 130,
    }
    explained = {int(code) for code in re.findall(r"^ +(\d+)  ", CODES, re.MULTILINE)}
    assert explained == {0, 130, 141, *codes.values()}


def test_an_error_of_the_library_is_one_safe_line() -> None:
    result = ended(errors.PrunedError("checkpoint 3 of\n\x1b[31mred was pruned"))
    assert (result.exit_code, result.stdout) == (3, "before\n")
    assert result.stderr == "checkrun: checkpoint 3 of\\n\\x1b[31mred was pruned\n"


def test_an_error_of_the_system_is_told_without_its_number() -> None:
    result = ended(errors.StorageError(13, "/x/zarr.json: permission denied"))
    assert (result.exit_code, result.stderr) == (5, "checkrun: /x/zarr.json: permission denied\n")


def test_what_nobody_expected_is_shown() -> None:
    result = ended(RuntimeError("a bug"))
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(), 141), (KeyboardInterrupt(), 130)])
def test_quiet_endings(error: BaseException, code: int) -> None:
    result = ended(error)
    assert (result.exit_code, result.stderr) == (code, "")


def test_a_warning_of_the_library_is_one_line() -> None:
    result = ended(lambda: warnings.warn("3 is burnt", errors.BurntNumberWarning, stacklevel=1))
    assert (result.exit_code, result.stderr) == (0, "checkrun: warning: 3 is burnt\n")


def test_other_warnings_are_as_they_were() -> None:
    with pytest.warns(UserWarning, match="another"):
        warnings.warn("another", UserWarning, stacklevel=1)
    result = ended(lambda: warnings.warn("another", UserWarning, stacklevel=1))
    assert isinstance(result.exception, UserWarning)


def test_problems_that_were_met_are_told_at_the_end() -> None:
    problems = [Problem(place="zarr.json", kind="damaged", message="not JSON\n")]
    result = ended(lambda: conclude(problems, unreadable=2))
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "checkrun: zarr.json: damaged: not JSON\\n",
        "checkrun: 2 of these numbers cannot be read",
    ]
    assert ended(lambda: conclude([])).exit_code == 0


def test_paragraphs_of_help_keep_their_lines() -> None:
    assert (
        epilog("\n    a\n      b\n", examples="\n        c d\n", pointer=False) == "\b\na\n  b\n\n\b\nExample:\n  c d"
    )
