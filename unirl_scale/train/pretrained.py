"""Weights of a Hugging Face directory as a model's starting point, read by rows: no rank holds it whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.pretrained import INDEX, WEIGHTS
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.spec import Part, Rows, normal_rows, parameter_specs

VALUE_HEAD = ("value_head.weight", "value_head.bias")
_HEADS = {"lm_head.weight": "lm_head.weight", VALUE_HEAD[0]: "score.weight", VALUE_HEAD[1]: "score.bias"}
_BODY = "model."
_NO_STATE = ("rotary_emb.inv_freq",)  # what old files carry along


def hub_name(part: str) -> str:
    """The logical tensor's name in Hugging Face files."""
    return _HEADS.get(part, _BODY + part)


def begin(engine: NativeEngine, path: str, seed: int) -> None:
    """Fresh weights, or those of a directory; zero moments. Collective over the engine's mesh.

    Raises:
        ConfigError: the directory is not this model's.
    """
    if not path:
        engine.initialise(seed)
        return
    parts = [p for s in parameter_specs(engine.model, engine.ctx.leaves, engine.head) for p in s.parts]
    with PretrainedFiles(Path(path)) as files:
        engine.begin(pretrained_rows(files, parts, normal_rows(seed)))


def pretrained_rows(files: PretrainedFiles, parts: list[Part], fresh: Rows) -> Rows:
    """Rows of the logical tensors, from the files; of a value head that is not there, fresh ones.

    Raises:
        ConfigError: tensors are missing, of another shape, or there are some that this model cannot hold.
    """
    absent = [p.name for p in parts if hub_name(p.name) not in files.names]
    new_head = set(absent) == set(VALUE_HEAD)
    if absent and not new_head:
        raise ConfigError(
            f"{files.folder}: it lacks {hub_name(absent[0])}; must hold every weight of the model"
        )
    _refuse_strangers(files, {hub_name(p.name) for p in parts})

    def rows(part: Part, start: int, stop: int) -> np.ndarray:
        if new_head and part.name in VALUE_HEAD:
            return fresh(part, start, stop)
        return files.rows(hub_name(part.name), (part.rows, part.cols), start, stop)

    return rows


def _refuse_strangers(files: PretrainedFiles, known: set[str]) -> None:
    for name in sorted(files.names - known):
        if not name.startswith(_BODY) or name.endswith(_NO_STATE):
            continue  # another head
        if name.endswith("o_proj.bias") and not files.whole(name).any():
            continue  # families with attention_bias have one; without values it changes nothing
        raise ConfigError(f"{files.folder}: it holds {name}, which this model has no place for")


class PretrainedFiles:
    """The safetensors files of a directory; use as a context manager.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack, self._open = ExitStack(), {}  # type: ignore[var-annotated]
        self._where = self._files()
        self._kept: tuple[str, np.ndarray] | None = None

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def __enter__(self) -> PretrainedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rows(self, name: str, shape: tuple[int, int], start: int, stop: int) -> np.ndarray:
        """fp32 [stop - start, max(cols, 1)] of a tensor of this shape, [rows] where cols is 0."""
        file = self._file(self._where[name])
        piece = file.get_slice(name)
        expected = [n for n in shape if n]
        found = list(piece.get_shape())
        if found != expected:
            raise ConfigError(f"{self.folder}: {name} is {found}; this model's is {expected}")
        if (start, stop) == (0, shape[0]):  # asked for once a leaf when leaves cut columns
            if self._kept is None or self._kept[0] != name:
                self._kept = name, self.whole(name)
            return self._kept[1].reshape(shape[0], -1)
        return piece[start:stop].float().numpy().reshape(stop - start, -1)  # type: ignore[no-any-return]

    def whole(self, name: str) -> np.ndarray:
        """A tensor, fp32."""
        return self._file(self._where[name]).get_tensor(name).float().numpy()  # type: ignore[no-any-return]

    def _files(self) -> Mapping[str, str]:
        """Tensor name -> file name."""
        index = self.folder / INDEX
        if index.exists():
            where: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return where
        if not (self.folder / WEIGHTS).exists():
            raise ConfigError(f"{self.folder}: it has neither {WEIGHTS} nor {INDEX}")
        return dict.fromkeys(self._file(WEIGHTS).keys(), WEIGHTS)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self.folder / name, "pt"))
        return self._open[name]
