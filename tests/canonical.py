"""The canonical tree by its definition, word for word: the truth that everything ordered is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def naive_split(length: int) -> int:
    """The largest power of two below `length` (RFC 6962, section 2.1), by counting up."""
    power = 1
    while power * 2 < length:
        power *= 2
    return power


def naive_tree(leaves: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The tree over the leaves, recursively."""
    if len(leaves) == 1:
        return leaves[0]
    middle = naive_split(len(leaves))
    return add(naive_tree(leaves[:middle], add), naive_tree(leaves[middle:], add))


def pair(left: object, right: object) -> object:
    """An addition that shows which tree was built."""
    return (left, right)
