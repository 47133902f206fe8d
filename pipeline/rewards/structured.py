"""Shipped reward for structured output: is the completion JSON of the right shape?

In: completions and a JSON schema. Out: 1.0 or 0.0. Needs jsonschema (the extra `json`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.errors import RewardLoadError
from pipeline.rewards.columns import Completions, column, texts_of

Check: TypeAlias = Callable[[Any], bool]
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


def json_schema(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    schema: str | Sequence[Any] = "",
    fenced: bool = True,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion is JSON that the schema accepts, else 0.0.

    schema: JSON text or the path of a file. Without it each row brings its own in the column
    `schema`, as text or as an object; None there means that the reward does not apply.
    fenced: JSON inside a ``` block counts too.
    """
    make_check = _validator()
    checks: Sequence[Check | None]
    if schema and isinstance(schema, str):
        checks = [make_check(_read(schema))] * len(completions)
    else:
        rows = column({"schema": schema} if schema else columns, "schema", len(completions))
        checks = [None if row is None else make_check(_parsed(row)) for row in rows]

    def score(text: str, accepts: Check | None) -> float | None:
        if accepts is None:
            return None
        block = _FENCED.search(text) if fenced else None
        try:
            value = json.loads(block[1] if block else text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        return float(accepts(value))

    return [score(text, accepts) for text, accepts in zip(texts_of(completions), checks, strict=True)]


def _validator() -> Callable[[object], Check]:
    """From a schema to a check of values."""
    try:
        import jsonschema
        from referencing.jsonschema import EMPTY_REGISTRY
    except ImportError as error:
        raise RewardLoadError("the reward 'json_schema' needs jsonschema: pip install rollstream[json]") from error

    def make(schema: object) -> Check:
        if not isinstance(schema, dict):
            raise TypeError(f"a JSON schema is an object, not {type(schema).__name__}")
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.message}") from error
        # With a registry of its own it fetches nothing: a schema may come from a data set.
        return kind(schema, registry=EMPTY_REGISTRY).is_valid

    return make


def _read(schema: str) -> object:
    if schema.lstrip().startswith("{"):
        return _parsed(schema)
    path = Path(schema).expanduser()
    if not path.is_file():
        raise ValueError(f"schema = {schema!r} is neither JSON nor a file")
    return _parsed(path.read_text(encoding="utf-8-sig"))


def _parsed(schema: object) -> object:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
