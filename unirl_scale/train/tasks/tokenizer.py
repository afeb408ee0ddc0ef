"""Character and byte tokenizers: enough for verifiable tasks, and nothing to download."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.problems import Problem, raise_all, show

_UNKNOWN_TEXT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerOptions:
    """`byte`: 256 byte values and the specials. `charset`: the characters of `charset` and the specials."""

    mode: Literal["byte", "charset"] = "byte"
    charset: str = ""
    unknown: Literal["error", "unk"] = "error"  # a character outside the charset


class TokenizeError(ConfigError):
    """A text holds a character that the charset lacks."""


class Tokenizer:
    """Text to token ids and back.

    Special ids come first (pad 0, bos 1, eos 2, unk 3) and decode to nothing, except that an unknown
    character decodes to U+FFFD.

    Raises:
        ConfigError: an empty charset, or one that names a character twice.
    """

    pad_id, bos_id, eos_id, unk_id = 0, 1, 2, 3
    _FIRST = 4

    def __init__(self, options: TokenizerOptions, path: str = "task.tokenizer") -> None:
        self.options = options
        self._bytes = options.mode == "byte"
        self._ids = {c: i for i, c in enumerate(options.charset, start=self._FIRST)}
        self._texts = ("", "", "", _UNKNOWN_TEXT, *options.charset)
        raise_all(_problems(options, f"{path}.charset"))

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""
        return self._FIRST + (256 if self._bytes else len(self.options.charset))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of the text, without specials around it.

        Raises:
            TokenizeError: a character is not in the charset and `unknown` is "error".
        """
        if self._bytes:
            return tuple(b + self._FIRST for b in text.encode("utf-8", errors="replace"))
        if self.options.unknown == "unk":
            return tuple(self._ids.get(c, self.unk_id) for c in text)
        try:
            return tuple(self._ids[c] for c in text)
        except KeyError as error:
            missing = "".join(dict.fromkeys(c for c in text if c not in self._ids))
            got, rule = show(self.options.charset), f"lacks {show(missing)} of the text {show(text)}"
            hint = "add these characters, or unknown: unk"
            problem = Problem(path="task.tokenizer.charset", got=got, rule=rule, hint=hint)
            raise TokenizeError(str(problem)) from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids. Bytes that are no UTF-8 (a model can sample them) become U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        ids = list(ids)
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"token id: got {bad[0]}, must lie in [0, {self.vocab_size})")
        if self._bytes:
            text = bytes(i - self._FIRST for i in ids if i >= self._FIRST)
            return text.decode("utf-8", errors="replace")
        return "".join(self._texts[i] for i in ids)


def _problems(options: TokenizerOptions, path: str) -> list[Problem]:
    got = show(options.charset)
    if options.mode == "byte":
        rule = "must be empty when the mode is byte"
        return [Problem(path=path, got=got, rule=rule, hint="mode: charset")] if options.charset else []
    if not options.charset:
        rule = "must name every character of prompts and answers"
        return [Problem(path=path, got=got, rule=rule, hint='charset: "0123456789+-="')]
    twice = [c for c, n in Counter(options.charset).items() if n > 1]
    rule = f"must name each character once, not {show(''.join(twice))} twice"
    return [Problem(path=path, got=got, rule=rule, hint="leave one out")] if twice else []
