"""The house rules, held by reading the source: floors, cycles, one place to print, read environ or reduce.

Each rule is a function from sources to violations, so that a synthetic snippet can prove that it bites.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "unirl_scale"
FLOORS = {"core": 1, "kernels": 2, "rl": 2, "comm": 3, "parallel": 4, "train": 5, "launch": 6}
MAY_PRINT = {"unirl_scale/launch/console.py"}
MAY_READ_ENVIRON = {"unirl_scale/launch/environment.py"}
MAY_REDUCE = {"unirl_scale/comm/fast.py"}
# Packages of their own that the planning half of comm/ consists of, by path.
PLANNING = (
    "comm/tree.py",
    "comm/topology/",
    "comm/cost",
    "comm/plan",
    "comm/environment_",
    "comm/probe.py",
)

Sources = Mapping[str, ast.Module]


def parse(texts: Mapping[str, str]) -> Sources:
    return {path: ast.parse(text) for path, text in texts.items()}


@pytest.fixture(scope="module")
def sources() -> Sources:
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return parse({str(path.relative_to(ROOT)): path.read_text() for path in paths})


def module_of(path: str) -> str:
    """`unirl_scale/core/check.py` -> unirl_scale.core.check; a package's __init__ -> the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(path: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each import of our package, anywhere in the file; "" = the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative
                package = module_of(path).split(".")
                package = package if path.endswith("__init__.py") else package[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            if base.split(".")[0] == PACKAGE:
                for alias in node.names:
                    yield node.lineno, base, alias.name


def folder_of(module: str) -> str:
    return [*module.split("."), "", ""][1]


def floor_violations(sources: Sources) -> list[str]:
    """Imports from a sibling or a higher floor. The package's own top (version) is below every floor."""
    found = []
    for path, tree in sources.items():
        here = folder_of(module_of(path))
        for line, module, name in imports_of(path, tree):
            there = folder_of(f"{module}.{name}")
            if here in FLOORS and there in FLOORS and here != there and FLOORS[there] >= FLOORS[here]:
                found.append(f"{path}:{line}: {here} imports {module} {name}")
    return found


def import_cycles(sources: Sources) -> list[list[str]]:
    """Strongly connected modules (Tarjan 1972), each a cycle.

    `from package import name` leads to the module package.name where there is one, else to the package.
    """
    known = {module_of(path): path for path in sources}
    edges: dict[str, set[str]] = {module: set() for module in known}
    for module, path in known.items():
        for _, base, name in imports_of(path, sources[path]):
            there = f"{base}.{name}" if f"{base}.{name}" in known else base
            if there in known and there != module:
                edges[module].add(there)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for there in sorted(edges[module]):
            if there not in index:
                visit(there)
                low[module] = min(low[module], low[there])
            elif there in stack:
                low[module] = min(low[module], index[there])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for module in edges:
        if module not in index:
            visit(module)
    return cycles


def nodes(sources: Sources, but: set[str]) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in sources.items():
        if path not in but:
            for node in ast.walk(tree):
                yield path, node


def prints(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno}"
        for path, node in nodes(sources, MAY_PRINT)
        if isinstance(node, ast.Name) and node.id == "print"
    ]


def environment_uses(sources: Sources) -> list[str]:
    """os.environ, os.getenv, os.putenv, whether as an attribute or imported by name."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = []
    for path, node in nodes(sources, MAY_READ_ENVIRON):
        attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        imported = (
            isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        )
        if attribute or imported:
            found.append(f"{path}:{node.lineno}")  # type: ignore[attr-defined]
    return found


def global_statements(sources: Sources) -> list[str]:
    return [f"{path}:{node.lineno}" for path, node in nodes(sources, set()) if isinstance(node, ast.Global)]


def float_reductions(sources: Sources) -> list[str]:
    """ReduceOp.SUM and its like, and reducing collectives whose op is left to its default, which is SUM."""
    found = []
    ops = {"SUM", "AVG", "PREMUL_SUM", "PRODUCT"}
    collectives = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced"}
    for path, node in nodes(sources, MAY_REDUCE):
        if isinstance(node, ast.Attribute) and node.attr in ops and "ReduceOp" in ast.unparse(node.value):
            found.append(f"{path}:{node.lineno}")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in collectives
        ):
            of_torch = ast.unparse(node.func.value) in {"dist", "torch.distributed", "distributed"}
            if of_torch and not any(keyword.arg == "op" for keyword in node.keywords):
                found.append(f"{path}:{node.lineno}")
    return found


def test_the_package_was_read(sources: Sources) -> None:
    assert len(sources) > 20
    assert {folder_of(module_of(path)) for path in sources} >= FLOORS.keys()


def test_imports_go_down(sources: Sources) -> None:
    assert floor_violations(sources) == []


def test_there_are_no_import_cycles(sources: Sources) -> None:
    assert import_cycles(sources) == []


def test_only_the_console_prints(sources: Sources) -> None:
    assert prints(sources) == []


def test_only_one_file_reads_the_environment(sources: Sources) -> None:
    assert environment_uses(sources) == []


def test_nothing_is_global(sources: Sources) -> None:
    assert global_statements(sources) == []


def test_only_the_fast_mode_lets_the_transport_add_floats(sources: Sources) -> None:
    assert float_reductions(sources) == []


def torch_free_modules(sources: Sources) -> list[str]:
    """core, and the planning half of comm."""
    planning = tuple(f"{PACKAGE}/{prefix}" for prefix in PLANNING)
    return [module_of(path) for path in sources if path.startswith((f"{PACKAGE}/core/", *planning))]


def loaded_with(modules: list[str]) -> set[str]:
    """Modules in sys.modules after these imports, in a fresh interpreter without site (whose .pth files may
    import anything)."""
    code = f"import sys\nfor name in {modules!r}: __import__(name)\nsys.stdout.write(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {[str(ROOT), *sys.path]!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.split())


def test_core_and_the_planner_leave_torch_out(sources: Sources) -> None:
    modules = torch_free_modules(sources)
    assert f"{PACKAGE}.core.check" in modules
    loaded = loaded_with(modules)
    assert set(modules) <= loaded
    assert "torch" not in loaded


# ---- each rule bites -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "bites"),
    [
        ("unirl_scale/core/a.py", "from unirl_scale.train.loop import run", True),
        ("unirl_scale/core/a.py", "def f():\n    import unirl_scale.launch.cli", True),
        ("unirl_scale/core/a.py", "from ..comm import tree", True),
        ("unirl_scale/core/a.py", "from unirl_scale import comm", True),
        ("unirl_scale/kernels/a.py", "from unirl_scale.rl import losses", True),
        ("unirl_scale/rl/a.py", "from unirl_scale.kernels.table import OpTable", True),
        ("unirl_scale/train/a.py", "from unirl_scale.comm.tree import nodes", False),
        (
            "unirl_scale/train/a.py",
            "from .metrics import Reporter\nfrom unirl_scale import __version__",
            False,
        ),
    ],
)
def test_the_floor_rule_bites(path: str, text: str, bites: bool) -> None:
    assert bool(floor_violations(parse({path: text}))) is bites


def test_the_cycle_rule_bites() -> None:
    texts = {
        "unirl_scale/core/a.py": "from unirl_scale.core.b import x",
        "unirl_scale/core/b.py": "import unirl_scale.core.c",
        "unirl_scale/core/c.py": "def f():\n    from unirl_scale.core import a",
        "unirl_scale/core/d.py": "from unirl_scale.core import a",
    }
    assert import_cycles(parse(texts)) == [["unirl_scale.core.a", "unirl_scale.core.b", "unirl_scale.core.c"]]
    assert import_cycles(parse({**texts, "unirl_scale/core/c.py": ""})) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (prints, "print('x')"),
        (prints, "show = print"),
        (environment_uses, "import os\nx = os.environ['A']"),
        (environment_uses, "from os import getenv"),
        (environment_uses, "import os\nos.putenv('a', 'b')"),
        (global_statements, "def f():\n    global x\n    x = 1"),
        (float_reductions, "dist.all_reduce(x, op=dist.ReduceOp.SUM)"),
        (float_reductions, "dist.reduce_scatter_tensor(y, x, group=g)"),
        (float_reductions, "op = torch.distributed.ReduceOp.AVG"),
    ],
)
def test_the_other_rules_bite(rule: object, text: str) -> None:
    assert callable(rule)
    assert rule(parse({"unirl_scale/train/a.py": text})) != []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (prints, "unirl_scale/launch/console.py", "print('x')"),
        (prints, "unirl_scale/train/a.py", "reporter.print_rows = 1  # print"),
        (environment_uses, "unirl_scale/launch/environment.py", "import os\nx = os.environ"),
        (environment_uses, "unirl_scale/train/a.py", "environ = {}\nx = environ['A']"),
        (float_reductions, "unirl_scale/comm/fast.py", "dist.all_reduce(x, op=dist.ReduceOp.SUM)"),
        (float_reductions, "unirl_scale/train/a.py", "dist.all_reduce(flag, op=dist.ReduceOp.MAX)"),
        (float_reductions, "unirl_scale/train/a.py", "ordered.all_reduce(x)"),
    ],
)
def test_the_rules_let_their_exceptions_pass(rule: object, path: str, text: str) -> None:
    assert callable(rule)
    assert rule(parse({path: text})) == []


def test_the_torch_rule_bites() -> None:
    # A module of ours that does load a heavy package; numpy stands for torch, which takes seconds.
    assert "numpy" not in loaded_with([f"{PACKAGE}.core.check"])
    assert "numpy" in loaded_with([f"{PACKAGE}.core.check", "numpy"])
