"""One digest for a task's data, so that a resume notices when the data changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from unirl_scale.train.tasks.interface import Prompt, Split


def fingerprint_of(splits: Mapping[Split, Sequence[Prompt]]) -> str:
    """SHA-256 (hex) over split names, order, texts, answers and targets.

    Metadata is left out: verifiers put values there that have no canonical form.
    """
    digest = hashlib.sha256()
    for name in sorted(splits):
        for prompt in splits[name]:
            record = [name, prompt.index, prompt.text, prompt.answer, prompt.target]
            digest.update(json.dumps(record, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()
