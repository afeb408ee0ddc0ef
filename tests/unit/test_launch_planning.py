"""`plan`, `probe` and the exports as a user meets them: files in, files out, refusals that name the file."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from unirl_scale.comm.plan import Plan
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.plan_file import read_plan
from unirl_scale.comm.topology import Link, cluster, make_box, read_topology, write_yaml
from unirl_scale.core.config import (
    HardwareConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    RunConfig,
)
from unirl_scale.core.errors import ConfigError, PlanError
from unirl_scale.core.load import resolve
from unirl_scale.launch.arguments import parse
from unirl_scale.launch.cli import main
from unirl_scale.launch.collectives import collective_environment, planned_environment, product_of
from unirl_scale.launch.console import Console
from unirl_scale.launch.planning import PlanCommand, PlanRequest, plan_command
from unirl_scale.launch.probing import hosts_topology

CONFIG = "mesh: {actor: {tp: 2, dp: 2}}\nmodel: {actor: {vocab_size: 64}}\n"
MACHINE = "a slots=2\nb slots=2\n"
FAST = Link(kind="HCCS", alpha_us=1.0, beta_gb_per_s=100.0)
NIC = Link(kind="nic", alpha_us=5.0, beta_gb_per_s=10.0)


@dataclass
class Files:
    """A folder with a configuration and a host file, and what the command printed."""

    folder: Path
    out: io.StringIO = field(default_factory=io.StringIO)

    def plan(self, *overrides: str, environ: dict[str, str] | None = None, **options: object) -> None:
        command = PlanCommand(
            config=str(self.folder / "run.yaml"),
            overrides=overrides,
            request=PlanRequest(files=(str(self.folder / "hosts"),)),
        )
        plan_command(
            replace(command, **options),  # type: ignore[arg-type]
            environ or {},
            Console(self.out, self.out),
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "hosts").write_text(MACHINE)
    return Files(tmp_path)


def test_plan_prints_checks_and_writes(files: Files) -> None:
    paths = {name: str(files.folder / f"plan.{name}") for name in ("yaml", "svg", "hosts")}
    files.plan(out=paths["yaml"], draw=paths["svg"], hosts=paths["hosts"])
    text = files.out.getvalue()
    assert "4 ranks on 2 nodes, gloo" in text
    assert "verified: every axis of every role puts each rank in exactly one group" in text
    plan = read_plan(paths["yaml"])
    assert (plan.nodes, plan.node.tolist()) == (("a", "b"), [0, 0, 1, 1])
    assert ElementTree.parse(paths["svg"]).getroot().tag.endswith("svg")
    assert Path(paths["hosts"]).read_text() == "a slots=2\nb slots=2\n"


def test_a_png_shows_what_the_svg_shows(files: Files) -> None:
    image = pytest.importorskip("matplotlib.image")
    pngs, svg = [str(files.folder / f"{name}.png") for name in ("one", "two")], str(files.folder / "plan.svg")
    for path in (*pngs, svg):
        files.plan(draw=path, quiet=True)
    assert Path(pngs[0]).read_bytes() == Path(pngs[1]).read_bytes()
    pixels = image.imread(pngs[0])
    root = ElementTree.parse(svg).getroot()
    assert pixels.shape[:2] == (2 * int(root.attrib["height"]), 2 * int(root.attrib["width"]))
    squares = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.attrib["width"] == "14"]
    assert len(squares) == 4
    for square in squares:
        row, column = (2 * int(square.attrib[at]) + 14 for at in ("y", "x"))
        shown = "#" + "".join(f"{round(255 * value):02x}" for value in pixels[row, column][:3].tolist())
        assert shown == square.attrib["fill"]


def test_a_png_without_matplotlib_names_the_extra(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlanError) as caught:
        files.plan(draw=str(files.folder / "plan.png"))
    assert "hint: pip install 'unirl-scale[plot]', or draw an .svg" in str(caught.value)
    assert not (files.folder / "plan.png").exists()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mpich", "a:2\nb:2\n"),
        ("slurm", "a\na\nb\nb\n"),
        ("rankfile", "rank 0=a slot=0\nrank 1=a slot=1\nrank 2=b slot=0\nrank 3=b slot=1\n"),
    ],
)
def test_each_launcher_has_its_host_file(files: Files, form: str, text: str) -> None:
    path = files.folder / "out"
    files.plan(hosts=str(path), hosts_form=form, quiet=True)
    assert path.read_text() == text
    assert files.out.getvalue() == f"wrote {path}\n"


def test_other_ranks_than_the_meshes_are_searched(files: Files) -> None:
    request = PlanRequest(files=(str(files.folder / "hosts"),), ranks=2)
    files.plan("invariance.data_slots=2", request=request, out=str(files.folder / "p.json"))
    text = files.out.getvalue()
    assert text.startswith("1. tp ")
    assert "the first: mesh.actor." in text
    assert read_plan(str(files.folder / "p.json")).world_size == 2


@pytest.mark.parametrize("asked", ["file", "override"])
def test_an_automatic_mesh_is_searched_on_all_devices(files: Files, asked: str) -> None:
    model = "model: {actor: {vocab_size: 64, num_layers: 2}}\ninvariance: {model_leaves: 1, data_slots: 2}\n"
    (files.folder / "run.yaml").write_text(model + ("mesh: auto\n" if asked == "file" else ""))
    (files.folder / "hosts").write_text("a slots=3\nb slots=3\n")
    files.plan(*(() if asked == "file" else ("mesh=auto",)), out=str(files.folder / "p.yaml"))
    assert files.out.getvalue().startswith("1. tp ")
    plan = read_plan(str(files.folder / "p.yaml"))
    mesh = plan.role("actor").mesh
    assert plan.world_size == mesh.tp * mesh.pp * mesh.dp == 4  # of six devices: dp 2 x pp 2 at most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"out": "plan.txt"},
            "--out: got plan.txt; must end in .yaml or .yml or .json; hint: --out plan.yaml",
        ),
        ({"draw": "plan.pdf"}, "--draw: got plan.pdf; must end in .svg or .png; hint: --draw plan.svg"),
    ],
)
def test_a_wrong_ending_is_refused_before_planning(
    files: Files, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        files.plan(**options)
    assert str(caught.value) == message
    assert files.out.getvalue() == ""


def test_a_users_mistake_is_an_error_without_traceback(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    (files.folder / "bad").write_text("<system version='1'>\n")
    run, bad = str(files.folder / "run.yaml"), str(files.folder / "bad")
    assert main(["plan", run, "--topology", bad]) == 2
    assert capsys.readouterr().err.startswith(f"error: {bad}:2: got ")
    assert main(["plan", run, "mesh.actor.tp=3", "--topology", str(files.folder / "hosts")]) == 2
    assert "mesh.actor.tp: got 3" in capsys.readouterr().err


# ---- exports -------------------------------------------------------------------------------------------
def config(vendor: str, mode: str = "layout") -> RunConfig:
    return RunConfig(
        hardware=HardwareConfig(vendor=vendor),  # type: ignore[arg-type]
        invariance=InvarianceConfig(mode=mode),  # type: ignore[arg-type]
        mesh=MeshesConfig(actor=MeshConfig(tp=2, dp=2)),
    )


def planned(vendor: str) -> tuple[Plan, RunConfig]:
    cfg = config(vendor)
    return make_plan(cfg, cluster(make_box(2, FAST, nic=NIC, vendor="npu"), 2)), cfg


def test_variables_are_chosen_for_the_plan_and_the_users_own_win() -> None:
    plan, cfg = planned("cuda")
    topology = cluster(make_box(2, FAST, nic=NIC), 2)
    chosen = planned_environment(cfg, plan, topology, {"NCCL_IB_TIMEOUT": "20", "PATH": "/bin"})
    assert dict(chosen.variables) == {"NCCL_IB_TIMEOUT": "20"}
    assert chosen.reasons["NCCL_IB_TIMEOUT"] == "given by the user"
    plan, cfg = planned("npu")
    npu = planned_environment(cfg, plan, cluster(make_box(2, FAST, nic=NIC, vendor="npu"), 2), {})
    assert npu.variables["HCCL_OP_EXPANSION_MODE"] == "HOST"  # HCCS: a 910B
    cpu = planned_environment(config("cpu"), plan, topology, {"NCCL_ALGO": "Ring"})
    assert dict(cpu.variables) == {}


def test_the_users_variables_are_checked_without_a_topology_too() -> None:
    with pytest.raises(PlanError, match=r"NCCL_ALOG.*did you mean NCCL_ALGO"):
        collective_environment(config("cuda"), 2, 2, (), {"NCCL_ALOG": "Ring"})
    kept = collective_environment(config("cuda"), 2, 2, (), {"NCCL_ALGO": "Ring"})
    assert dict(kept.variables) == {"NCCL_ALGO": "Ring"}
    with pytest.raises(PlanError, match="HCCL_BUFFSIZE"):
        collective_environment(config("npu"), 2, 8, (), {"HCCL_BUFFSIZE": "x"}, "A2")


def test_the_ascend_product_is_told_by_links_or_named_never_guessed() -> None:
    assert product_of("950", None) == "950"
    assert product_of("", cluster(make_box(2, replace(FAST, kind="HCCS_SW"), vendor="npu"), 1)) == "A3"
    assert product_of("", cluster(make_box(2, FAST, vendor="npu"), 1)) == "A2"
    with pytest.raises(ConfigError, match="--product: got none, and no file shows the links of one"):
        product_of("", None)
    with pytest.raises(
        ConfigError, match="--product: got 'A4'; must be a known product; hint: one of 910, A2, A3, 950"
    ):
        product_of("A4", None)


# ---- probe ---------------------------------------------------------------------------------------------
def test_the_hosts_of_the_ranks_become_a_topology_that_plans(tmp_path: Path) -> None:
    topology = hosts_topology(["x", "x", "y", "y", "z"], "cuda")
    (tmp_path / "t.yaml").write_text(write_yaml(topology))
    again = read_topology(tmp_path / "t.yaml")
    assert again.nodes == ("x", "y", "z")
    assert again.devices_per_node.tolist() == [2, 2, 1]
    cfg = resolve(config("cuda"))
    assert make_plan(cfg, again).world_size == 4


@pytest.mark.parametrize(
    ("text", "sizes"), [("1K,4096,1M", (1024, 4096, 1 << 20)), ("64K,1K,1K", (1024, 65536))]
)
def test_sizes_are_read(text: str, sizes: tuple[int, ...]) -> None:
    assert parse(["probe", "--sizes", text]).sizes == sizes


@pytest.mark.parametrize("text", ["1K", "1X,2K", "-1,5", ""])
def test_sizes_that_cannot_be_fitted_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["probe", f"--sizes={text}"])
    assert caught.value.code == 2
    assert "--sizes: got" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("plan",), ("launch", "--scheduler", "slurm")])
def test_settings_may_follow_the_topology_files(tmp_path: Path, command: tuple[str, ...]) -> None:
    odd = tmp_path / "a=b"
    odd.write_text("n1 slots=2\n")
    files = ["hosts", str(odd), "missing=but/a/path"]
    args = parse([*command, "run.yaml", "--topology", *files, "mesh.actor.tp=2"])
    assert (args.topology, args.overrides) == (["hosts", str(odd)], ["missing=but/a/path", "mesh.actor.tp=2"])


def test_planning_and_rendering_load_no_torch() -> None:
    code = (
        "import sys, unirl_scale.launch.cli, unirl_scale.launch.planning, unirl_scale.launch.launching;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
