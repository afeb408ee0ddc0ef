"""What a run leaves in its directory, and who may write there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirl_scale.core.digest_compare import read_digests
from unirl_scale.core.errors import ConfigError
from unirl_scale.train.metrics import ACCURACY, REWARD, MetricsWriter, SilentReporter, read_metrics
from unirl_scale.train.plot import plot_run, stage_starts
from unirl_scale.train.rundir import RunDir, claim, hold, write_versions


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def finished_run(path: Path) -> RunDir:
    run_dir = RunDir(path)
    with claim(run_dir), MetricsWriter(run_dir) as writer:
        for step in range(1, 5):
            values = {REWARD: step / 4, "other": 1.0} | ({ACCURACY: 0.5} if step == 4 else {})
            writer.metrics(step, "sft" if step < 3 else "ppo", values)
            writer.digests(step, {"loss": f"d{step}"})
    return run_dir


def test_metrics_and_digests_read_back(tmp_path: Path) -> None:
    run_dir = finished_run(tmp_path / "a" / "b")
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3, 4]
    assert read_digests(run_dir.path)[3] == {"loss": "d3"}


def test_a_step_is_on_disk_when_it_is_logged(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    writer = MetricsWriter(run_dir)
    writer.metrics(1, "ppo", {REWARD: 1.0})
    assert len(read_metrics(run_dir)) == 1
    writer.close()


def test_numbers_that_json_lacks_are_texts(tmp_path: Path) -> None:
    with MetricsWriter(RunDir(tmp_path)) as writer:
        writer.metrics(1, "ppo", {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 0.5, "e": 3})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1, "stage": "ppo", "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5, "e": 3,
    }  # fmt: skip


def test_appending_after_a_killed_run_cuts_its_unfinished_line(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"step": 1, "stage": "ppo"}\n{"step": 2, "sta')
    with MetricsWriter(run_dir) as writer:
        writer.metrics(2, "ppo", {})
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2]


def test_a_directory_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with claim(run_dir):
        for overwrite in (False, True):
            with (
                pytest.raises(ConfigError, match=r"in use by a live run \(process \d+ on"),
                claim(run_dir, overwrite=overwrite),
            ):
                pytest.fail("held twice")
    with claim(run_dir):
        pass


def test_a_process_that_comes_back_to_its_job_is_let_in_and_clears_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with claim(run_dir, job="host:1") as first:
        assert first
        run_dir.config.write_text("running")
        with claim(run_dir, job="host:1", overwrite=True) as first:
            assert not first
        assert run_dir.config.read_text() == "running"
        for other in ("host:2", "host:11", ""):
            with pytest.raises(ConfigError, match=r"live run .*, job host:1"), claim(run_dir, job=other):
                pytest.fail("held twice")


def test_a_job_that_lost_its_holder_takes_the_directory_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with claim(run_dir, job="host:1"), hold(run_dir, "host:1") as mine:
        assert not mine, "the holder is alive"
    with hold(run_dir, "host:1") as mine:
        assert mine
        with pytest.raises(ConfigError, match="in use by a live run"), claim(run_dir, job="host:2"):
            pytest.fail("held twice")
    with (
        claim(run_dir, job="host:2"),
        pytest.raises(ConfigError, match="job host:2"),
        hold(run_dir, "host:1"),
    ):
        pytest.fail("held twice")


def test_a_finished_run_is_kept_unless_told(tmp_path: Path) -> None:
    run_dir = finished_run(tmp_path / "run")
    before = run_dir.metrics.read_text()
    with pytest.raises(ConfigError, match=r"hint: .*--overwrite"), claim(run_dir):
        pytest.fail("overwritten")
    assert run_dir.metrics.read_text() == before
    (run_dir.path / "notes.txt").write_text("mine")
    with claim(run_dir, overwrite=True):
        assert not run_dir.metrics.exists()
        assert not run_dir.digests.exists()
    assert (run_dir.path / "notes.txt").read_text() == "mine"


def test_what_never_completed_a_step_is_cleared(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with claim(run_dir):
        run_dir.config.write_text("old")
        run_dir.logs.mkdir()
    with claim(run_dir):
        assert not run_dir.config.exists()
        assert not run_dir.logs.exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_other_files_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "config.yaml").write_text("somebody's")
    with (
        pytest.raises(ConfigError, match=r"not a run's, e\.g\. config\.yaml"),
        claim(RunDir(tmp_path), overwrite=overwrite),
    ):
        pytest.fail("claimed")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"run_dir: got .*must be a directory"),
        claim(RunDir(tmp_path / "file" / "run")),
    ):
        pytest.fail("claimed")


def test_versions_gather_what_is_added(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_versions(run_dir, {})
    write_versions(run_dir, {"kernels": "reference"})
    versions = json.loads(run_dir.versions.read_text())
    assert versions["kernels"] == "reference"
    assert {"python", "torch", "numpy", "unirl_scale", "platform"} <= versions.keys()


def test_the_plot_is_a_png_of_the_series_there_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_dir = finished_run(tmp_path / "run")
    assert plot_run(run_dir, SilentReporter()) == run_dir.plot
    assert run_dir.plot.read_bytes().startswith(b"\x89PNG")
    empty = RunDir(tmp_path / "empty")
    empty.path.mkdir()
    assert plot_run(empty, SilentReporter()) is None


def test_without_matplotlib_one_warning_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    reporter = Warnings()
    assert plot_run(finished_run(tmp_path / "run"), reporter) is None
    assert reporter.warnings == [
        "no plot.png: matplotlib is not installed; hint: pip install 'unirl-scale[plot]'"
    ]


def test_stages_start_where_their_name_first_stands() -> None:
    records = [
        {"step": step, "stage": stage} for step, stage in ((1, "sft"), (2, "sft"), (3, "ppo"), (4, "ppo"))
    ]
    assert stage_starts(records) == [(1, "sft"), (3, "ppo")]
