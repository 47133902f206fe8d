"""From a name in the settings to a function that can be called. Runs in the child only.

In: "package.module:function", "path/reward.py:function" or the name of a shipped reward. Out: a
function that takes TRL's arguments, with the settings' kwargs bound. What cannot be called as a
reward raises `RewardLoadError` now, not at the thousandth group.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

from pipeline.errors import RewardLoadError

RewardFunction: TypeAlias = functools.partial[Any]

SHIPPED = {
    "exact_match": "pipeline.rewards.text:exact_match",
    "format": "pipeline.rewards.text:format",
    "length": "pipeline.rewards.text:length",
    "choice": "pipeline.rewards.text:choice",
    "math": "pipeline.rewards.math:math",
    "json_schema": "pipeline.rewards.structured:json_schema",
    "python_tests": "pipeline.rewards.code:python_tests",
}
_SIGNATURE = "def reward(prompts, completions, **columns) -> list[float | None]"
MACHINERY = frozenset({__file__, str(Path(__file__).with_name("child.py"))})
_STDLIB = str(Path(traceback.__file__).parent)
_MAX_MESSAGE_CHARS = 4000
_PASSED_ALWAYS = ("prompts", "completions", "completion_ids")


def load_function(function: str, kwargs: Mapping[str, object]) -> RewardFunction:
    """The function of that name, its kwargs bound. Raises RewardLoadError."""
    target = SHIPPED.get(function, function)
    where, colon, attribute = target.rpartition(":")
    if not colon or not where or not attribute:
        raise RewardLoadError(_unknown_name(function))
    module = _load_file(where, function) if where.endswith(".py") else _load_module(where, function)
    found = getattr(module, attribute, None)
    if found is None:
        raise RewardLoadError(f"{function!r}: {where} has no {attribute!r}{_nearest(attribute, _callables(module))}")
    _check_kind(found, function)
    _check_signature(found, function, kwargs)
    bound = functools.partial(found, **kwargs)
    if function in SHIPPED:
        _try_on_nothing(bound, function)
    return bound


def short_name(function: str) -> str:
    """What a reward is called in metrics unless the settings say otherwise."""
    return function.rpartition(":")[2]


def _unknown_name(function: str) -> str:
    looks_like_path = any(sign in function for sign in (".", "/"))
    if looks_like_path:
        return f'{function!r} does not say which function: write "{function.rstrip(":")}:function_name"'
    shipped = ", ".join(sorted(SHIPPED))
    return (
        f"{function!r} is not a shipped reward{_nearest(function, SHIPPED)} Shipped are: {shipped}. "
        'Your own is named "package.module:function" or "path/reward.py:function".'
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else "."


def _callables(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def _load_file(where: str, function: str) -> ModuleType:
    file = Path(where).expanduser().resolve()
    if not file.is_file():
        raise RewardLoadError(
            f"{function!r}: there is no file {file}; a path is taken relative to the working directory {Path.cwd()}."
        )
    if file.parent.as_posix() not in sys.path:
        sys.path.append(file.parent.as_posix())
    name = f"rollstream_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardLoadError(f"{function!r}: {file} cannot be read as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    _run_user_code(lambda: loader.exec_module(module), function)
    return module


def _load_module(where: str, function: str) -> ModuleType:
    return cast(ModuleType, _run_user_code(lambda: importlib.import_module(where), function))


def _run_user_code(action: Callable[[], object], function: str) -> object:
    try:
        return action()
    except RewardLoadError:
        raise
    except ModuleNotFoundError as error:
        raise RewardLoadError(
            f"{function!r} cannot be imported: {message_of(error)}. Install what it needs, or give the file as "
            '"path/reward.py:function"; modules in the working directory are found too.'
        ) from error
    except (Exception, SystemExit) as error:
        raise RewardLoadError(f"{function!r} cannot be imported: {said_by(error)}{place_of(error)}.") from error


def said_by(error: BaseException) -> str:
    """Type and message."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """The message of an error of the user's, which may be of a class that cannot say it, or without end."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - it is the user's code
        return f"(its message cannot be made: {type(failure).__name__})"
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "..."


def place_of(error: BaseException) -> str:
    """Where the user's code failed, as " (file:line)"; empty if unknown.

    The line nearest to the failure that is in neither a library nor this package's own machinery.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename not in MACHINERY
    ]
    frames = [frame for frame in frames if not _is_library(frame.filename)] or frames
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def traceback_of(error: BaseException) -> str:
    """The traceback from the user's code on; the calls that led there are ours."""
    start = trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in MACHINERY and trace.tb_next is not None:
            start = trace.tb_next
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


def missing_argument(function: RewardFunction, given: Collection[str]) -> str | None:
    """The first parameter without a default that is not among `given`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return next(
        (
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind in kinds and parameter.default is parameter.empty and name not in given
        ),
        None,
    )


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith((_STDLIB, "<"))


def _check_kind(found: object, function: str) -> None:
    if inspect.isclass(found):
        raise RewardLoadError(
            f"{function!r} is a class; name a function, or an instance of the class that can be called."
        )
    if not callable(found):
        raise RewardLoadError(f"{function!r} names a value ({type(found).__name__}); name a function: {_SIGNATURE}")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise RewardLoadError(f"{function!r} is a generator; return a list, as in: {_SIGNATURE}")


def _check_signature(found: Callable[..., Any], function: str, kwargs: Mapping[str, object]) -> None:
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError) as error:
        raise RewardLoadError(f"{function!r} has no signature that can be read; wrap it in: {_SIGNATURE}") from error
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise RewardLoadError(
            f"{function!r} does not take the columns of the data set: add **columns, as in: {_SIGNATURE}"
        )
    only_by_position = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_ONLY]
    if only_by_position:
        raise RewardLoadError(f"{function!r} takes {only_by_position[0]!r} only by position; use: {_SIGNATURE}")
    named = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY} and name not in _PASSED_ALWAYS
    ]
    for name in kwargs:
        if name not in named:
            takes = ", ".join(named) or "no settings"
            raise RewardLoadError(
                f"{function!r} does not take the setting {name!r}{_nearest(name, named)} It takes: {takes}."
            )


def try_on_row(bound: RewardFunction, function: str, arguments: Mapping[str, Any], where: str) -> None:
    """Whether a row has all that the function asks for. Raises RewardLoadError.

    A shipped reward is called. One of the user's is not: it may cost money, or have effects.
    """
    columns = [name for name in arguments if name not in _PASSED_ALWAYS]
    if (missing := missing_argument(bound, arguments)) is not None:
        raise RewardLoadError(
            f"{function!r}, {where}: missing a required argument: {missing!r}, which is no column; there are: "
            f"{', '.join(sorted(columns)) or 'none'}. Rename the column, name the value in kwargs, or give the "
            "parameter a default."
        )
    if function not in SHIPPED:
        return
    try:
        bound(**arguments)
    except Exception as error:
        raise RewardLoadError(f"{function!r}, {where}: {error}") from error


def _try_on_nothing(bound: RewardFunction, function: str) -> None:
    """Shipped rewards check their settings and optional packages before they look at completions."""
    try:
        bound(prompts=[], completions=[], completion_ids=[])
    except RewardLoadError:
        raise
    except Exception as error:
        raise RewardLoadError(f"{function!r} does not work with its settings: {error}") from error
