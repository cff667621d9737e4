"""Numbers about the source, read by people: `make house`.

Nothing here is a limit. A number that grows is a question: which file would a reader miss least?
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dpfunc
from dpfunc.errors import InsecureKeyWarning

ROOT = Path(dpfunc.__file__).parent
API = ROOT.parent / "tests" / "public_api.txt"
AROUND = tuple(ROOT.parent / name for name in ("tests", "examples", "benchmarks", "tools"))
VAGUE = ("What", "Whether", "Which", "How")
SHORT = 5
COMPLEX = 10
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert, ast.match_case)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def complexity(function: Function) -> int:
    """Cyclomatic complexity: one more than the number of branches, without those of functions inside."""
    found, todo = 1, list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, (Function, ast.Lambda)):
            continue
        found += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            found += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        todo += ast.iter_child_nodes(node)
    return found


def defined(tree: ast.Module) -> set[str]:
    """Names that a module defines, without an underscore."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (Function, ast.ClassDef)):
            names.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def used(tree: ast.AST) -> set[str]:
    """Names that a file imports, or reads as attributes."""
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def docstrings(trees: dict[str, ast.Module]) -> Iterator[str]:
    """The first line of each docstring."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield text.splitlines()[0]


def modules_imported(tree: ast.AST) -> set[str]:
    """Modules of dpfunc that a file imports."""
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {module for module in found if module.split(".")[0] == "dpfunc"}


def inner_imports(tree: ast.AST) -> int:
    """Imports inside of functions."""
    inner = (node for each in functions(tree) for node in ast.walk(each))  # those of nested functions come twice
    return len({node for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))})


def way_of_a_batch() -> list[str]:
    """Files of dpfunc that run in the second step of a small model, in the order in which they are reached."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    forward, params = dpfunc.functionalize(module)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return forward(params, batch["x"]).square().sum(1)

    plan = dpfunc.Plan.for_budget(
        epsilon=8.0, delta=1e-3, dataset_size=640, expected_batch_size=80, num_steps=2, clip=dpfunc.clipping.Automatic()
    )
    step = dpfunc.make_dp_step(loss_fn, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InsecureKeyWarning)  # the same draws and audits in each run
        state = step.init(params, key=dpfunc.insecure_key(9120))
    data = {"x": torch.randn(640, 4)}
    reached: dict[str, None] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            reached.setdefault(str(Path(path).relative_to(ROOT)))

    for number, indices in enumerate(plan.batches(state)):
        batch = dpfunc.take(data, indices)
        sys.setprofile(profile if number else None)
        grads, state, _ = step(params, batch, state)
        sys.setprofile(None)
        params = {name: (param - grads[name]).detach().requires_grad_() for name, param in params.items()}
    return list(reached)


def numbers(way: Sequence[str]) -> dict[str, int | str]:
    """Each number by its name."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in trees}
    every = [function for tree in trees.values() for function in functions(tree)]
    complicated = sum(complexity(function) > COMPLEX for function in every)
    public = {name: defined(tree) for name, tree in trees.items()}
    exported = set(API.read_text().split())
    uses = {name: used(tree) for name, tree in trees.items()}
    around = set[str]().union(*(used(ast.parse(path.read_text())) for each in AROUND for path in each.rglob("*.py")))
    only_here = sum(
        own not in exported | around and not any(own in found for other, found in uses.items() if other != name)
        for name, names in public.items()
        for own in names
    )
    first_lines = list(docstrings(trees))
    return {
        "files": len(trees),
        "lines": sum(lines.values()),
        "files on the way of a batch, after the first step": len(way),
        "lines of these files": sum(lines[name] for name in way),
        "modules that step.py imports": len(modules_imported(trees["step.py"])),
        "public names at module level": sum(map(len, public.values())),
        "names meant to be public": len(exported),
        "names without an underscore that only their own file uses, tests and examples included": only_here,
        "functions": len(every),
        f"functions of complexity > {COMPLEX}": f"{complicated} ({100 * complicated / len(every):.1f} %)",
        "imports inside of functions": sum(map(inner_imports, trees.values())),
        "docstrings that begin with " + ", ".join(VAGUE): sum(line.split()[0] in VAGUE for line in first_lines),
        f"docstrings of {SHORT} words or fewer": sum(len(line.split()) <= SHORT for line in first_lines),
    }


def longest(count: int = 5) -> dict[str, list[str]]:
    """The longest files and functions, in lines without docstrings."""
    files: list[tuple[int, str]] = []
    found: list[tuple[int, str]] = []
    for path in ROOT.rglob("*.py"):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        files.append((len(text.splitlines()), name))
        for function in functions(ast.parse(text)):
            start = function.body[0].end_lineno if ast.get_docstring(function) else function.lineno
            found.append(((function.end_lineno or 0) - (start or 0), f"{name}: {function.name}"))
    shown = {"files": files, "functions": found}
    return {
        what: [f"{name} ({lines})" for lines, name in sorted(all_)[: -count - 1 : -1]] for what, all_ in shown.items()
    }


def main() -> None:
    """Print them."""
    table = Table("what", "number")
    way = way_of_a_batch()
    for name, value in numbers(way).items():
        table.add_row(name, str(value))
    Console().print(table)
    Console().print("The way of a batch:", ", ".join(way))
    for what, names in longest().items():
        Console().print(f"The longest {what}:", ", ".join(names))


if __name__ == "__main__":
    main()
