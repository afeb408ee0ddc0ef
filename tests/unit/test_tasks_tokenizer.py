"""Byte and charset tokenizers: round trips, specials, unknown characters."""

from __future__ import annotations

import pytest

from unirl_scale.core.errors import ConfigError
from unirl_scale.train.tasks.tokenizer import TokenizeError, Tokenizer, TokenizerOptions

BYTE = Tokenizer(TokenizerOptions())
DIGITS = Tokenizer(TokenizerOptions(mode="charset", charset="0123456789+-="))


@pytest.mark.parametrize("text", ["", "1+1=2", "Grüße, 世界 🚀", "\x00\n\t"])
def test_byte_round_trip(text: str) -> None:
    assert BYTE.decode(BYTE.encode(text)) == text
    assert len(BYTE.encode(text)) == len(text.encode())


def test_charset_round_trip_and_compact_ids() -> None:
    ids = DIGITS.encode("12+34=-5")
    assert DIGITS.decode(ids) == "12+34=-5" and len(ids) == 8
    assert DIGITS.vocab_size == 4 + 13 and max(DIGITS.encode("0123456789+-=")) == DIGITS.vocab_size - 1


def test_specials_are_distinct_never_encoded_and_decode_to_nothing() -> None:
    for tokenizer in (BYTE, DIGITS):
        specials = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id}
        assert specials == {0, 1, 2, 3}
        assert not specials & set(tokenizer.encode("1+2=3"))
        assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("1+2"), tokenizer.eos_id, 0, 0]) == "1+2"


def test_an_unknown_character_is_an_error_that_names_it() -> None:
    with pytest.raises(TokenizeError, match=r'lacks "\*x" of the text "3\*4x\*"') as caught:
        DIGITS.encode("3*4x*")
    assert "hint: add these characters, or unknown: unk" in str(caught.value)


def test_an_unknown_character_may_become_unk() -> None:
    lenient = Tokenizer(TokenizerOptions(mode="charset", charset="0123456789", unknown="unk"))
    ids = lenient.encode("3*4")
    assert ids[1] == lenient.unk_id and lenient.decode(ids) == "3\N{REPLACEMENT CHARACTER}4"


def test_sampled_bytes_that_are_no_utf8_decode_anyway() -> None:
    assert BYTE.decode([4 + 0xFF, 4 + ord("7")]) == "\N{REPLACEMENT CHARACTER}7"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    for bad in (-1, DIGITS.vocab_size):
        with pytest.raises(ValueError, match=f"token id: got {bad}"):
            DIGITS.decode([5, bad])


@pytest.mark.parametrize(
    "options, expected",
    [
        (TokenizerOptions(mode="charset"), "must name every character"),
        (TokenizerOptions(mode="charset", charset="0112"), 'not "1" twice'),
        (TokenizerOptions(charset="01"), "must be empty when the mode is byte"),
    ],
)
def test_a_bad_charset_is_refused(options: TokenizerOptions, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Tokenizer(options)
