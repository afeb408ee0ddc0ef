"""Verifiers by name: how a response is scored against the expected answer."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import Problem, name_hint, raise_all, show
from unirl_scale.train.tasks.interface import Prompt

_LOG = logging.getLogger(__name__)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4})?")

# (response, answer, metadata) -> score; None = cannot judge.
Verifier = Callable[[str, str | None, Mapping[str, Any]], float | None]


def judge(verifier: Verifier, prompt: Prompt, response_text: str) -> float | None:
    """The verifier's score, or None with a warning when it raised.

    Responses are arbitrary text and verifiers are other people's code: one that trips over a response makes
    that response unjudgeable, which `reward.on_invalid` handles, and does not end a run of days.
    """
    try:
        return verifier(response_text, prompt.answer, prompt.metadata)
    except Exception as error:
        _LOG.warning("verifier raised on prompt %d, response %r: %r", prompt.index, response_text, error)
        return None


def exact_match(response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1.0 when the texts are equal up to white space around them."""
    return float(answer is not None and response.strip() == answer.strip())


def last_number(text: str) -> Decimal | None:
    """The last number in the text; thousands separators are dropped."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def numeric(tolerance: float) -> Verifier:
    """1.0 when the last number of the response is within `tolerance` (absolute) of the answer's."""

    def verify(response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
        got, wanted = last_number(response), last_number(answer or "")
        if got is None or wanted is None:
            return 0.0
        if tolerance == 0.0:  # as decimals: float64 would take neighbouring large integers for equal
            return float(got == wanted)
        return float(abs(float(got) - float(wanted)) <= tolerance)

    return verify


def regex(pattern: str) -> Verifier:
    """With a pattern, its first group (or whole match) must equal the answer; without, the answer is one."""
    compiled = re.compile(pattern) if pattern else None

    def verify(response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
        if answer is None:
            return 0.0
        if compiled is None:
            return float(re.fullmatch(answer, response.strip()) is not None)
        found = compiled.search(response)
        if found is None:
            return 0.0
        return float(found.group(1 if compiled.groups else 0).strip() == answer.strip())

    return verify


NAMES = ("exact_match", "numeric", "regex")


def resolve(name: str, *, pattern: str = "", tolerance: float = 0.0, path: str = "task") -> Verifier:
    """The verifier that a configuration names.

    Args:
        name: one of NAMES, or `package.module:function` with the signature of `Verifier`.
        pattern: of `regex`.
        tolerance: of `numeric`.
        path: of the options, for errors.

    Raises:
        ConfigError: no such verifier, an import that fails, or a pattern that is no regular expression.
    """
    problems: list[Problem] = []
    if pattern and name != "regex":
        rule = f"belongs to the regex verifier, not to {name}"
        problems.append(Problem(path=f"{path}.pattern", got=show(pattern), rule=rule, hint="verifier: regex"))
    if tolerance and name != "numeric":
        rule = f"belongs to the numeric verifier, not to {name}"
        problems.append(
            Problem(path=f"{path}.tolerance", got=show(tolerance), rule=rule, hint="verifier: numeric")
        )
    if not 0.0 <= tolerance < float("inf"):
        problems.append(Problem(path=f"{path}.tolerance", got=show(tolerance), rule="must be >= 0", hint="0"))
    problems += _pattern_problems(pattern, path)
    raise_all(problems)
    if name == "exact_match":
        return exact_match
    if name == "numeric":
        return numeric(tolerance)
    return regex(pattern) if name == "regex" else _import(name, path)


def _pattern_problems(pattern: str, path: str) -> list[Problem]:
    try:
        re.compile(pattern)
    except re.error as error:
        rule = f"must be a regular expression ({error})"
        return [
            Problem(path=f"{path}.pattern", got=show(pattern), rule=rule, hint="check brackets and escapes")
        ]
    return []


def _import(name: str, path: str) -> Verifier:
    """The function behind `package.module:function`."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        rule = f"must be one of {', '.join(NAMES)} or package.module:function"
        raise ConfigError(str(_problem(path, name, rule, name_hint(name, NAMES))))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        rule = f"must import ({type(error).__name__}: {error})"
        hint = "the module must be installed or on PYTHONPATH"
        raise ConfigError(str(_problem(path, name, rule, hint))) from error
    found: Any = getattr(module, function_name, None)
    if not callable(found):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        rule = f"must name a function of {module_name}"
        raise ConfigError(str(_problem(path, name, rule, name_hint(function_name, functions))))
    verifier: Verifier = found
    return verifier


def _problem(path: str, name: str, rule: str, hint: str) -> Problem:
    return Problem(path=f"{path}.verifier", got=show(name), rule=rule, hint=hint)
