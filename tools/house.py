"""Numbers about the source, read by people: `make house`. It writes the picture of docs/architecture.md, too.

Nothing here is a limit. A number that grows is a question: which file would a reader miss least?
"""

from __future__ import annotations

import ast
import functools
import re
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
PAGE = ROOT.parent / "docs" / "architecture.md"
PICTURE = "<!-- picture: made by `make house` from the imports -->\n```mermaid\n"
AROUND = tuple(ROOT.parent / name for name in ("tests", "examples", "benchmarks", "tools"))
VAGUE = ("What", "Whether", "Which", "How")
SHORT = 5
COMPLEX = 10
HEADER = re.compile(r"^May import: (.+)\. Privacy depends on it: (yes|no)\.$", re.M)
DEPENDS = "<!-- where privacy depends on the file: made by `make house` from the first lines of the files -->\n"
RULES = ROOT.parent / "tests" / "test_house_rules.py"
ISOLATION = ROOT.parent / "docs" / "isolation.md"
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


def module_name(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Module of dpfunc -> modules that it imports, inside of functions too."""
    known = {module_name(path) for path in ROOT.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in known:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
                found |= inner or {node.module}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & known
        graph[module_name(path)] = found - {module_name(path)}
    return graph


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """All that can be reached from a node by at least one edge."""
    found, todo = set[str](), list(graph[start])
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += graph[node]
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves by way of others."""
    return [name for name in graph if name in reached(graph, name)]


def parts_of(folder: str, graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The files and folders in a folder, each as one node, and what they import of each other."""
    depth = folder.count(".") + 2

    def part(module: str) -> str:
        return ".".join(module.split(".")[:depth]) if module.startswith(f"{folder}.") else ""

    found: dict[str, set[str]] = {part(module): set() for module in graph if part(module)}
    for module, imported in graph.items():
        found.get(part(module), set()).update({part(name) for name in imported} - {"", part(module)})
    return found


def picture() -> str:
    """Folders and top-level files of dpfunc as a Mermaid chart: an arrow for each import that no longer way shows."""
    parts: dict[str, set[str]] = {}
    for module, imported in import_graph().items():
        if module != "dpfunc":  # it hands out names of all others
            own = parts.setdefault(module.split(".")[1], set())
            own |= {name.split(".")[1] for name in imported if name != "dpfunc"}
    parts = {name: imported - {name} for name, imported in parts.items()}
    lines = [
        f"    {name.strip('_')} --> {other.strip('_')}"
        for name, imported in sorted(parts.items())
        for other in sorted(imported)
        if not any(other in reached(parts, between) for between in imported - {other})
    ]
    return f"{PICTURE}flowchart TD\n" + "\n".join(lines) + "\n```\n"


def with_picture(page: str) -> str:
    """The page of the architecture with the picture of the imports as they are."""
    before, _, rest = page.partition(PICTURE)
    return before + picture() + rest.partition("```\n")[2]


@functools.cache
def layers() -> dict[str, int]:
    """Folders and top-level files with their layers, as tests/test_house_rules.py states them."""
    tree = ast.parse(RULES.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return dict(ast.literal_eval(node.value))
    raise LookupError(f"{RULES} has no LAYERS")


def may_import(path: Path) -> str:
    """What the header of a file says of its imports: its folder, the next layer below, and the layers below that."""
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    below = [number for number in layers().values() if number < layers()[own]]
    nearest = sorted(name for name, number in layers().items() if below and number == max(below))
    lower = [", ".join(nearest) + " and below"] if below and max(below) else nearest
    return f"May import: {', '.join([*['its folder'] * (path.parent != ROOT), *lower]) or 'nothing'}."


def header(path: Path) -> str:
    """The line in the docstring of a file that says what it may import, and whether privacy depends on it."""
    found = HEADER.search(ast.get_docstring(ast.parse(path.read_text())) or "")
    return found[0] if found else ""


def with_header(path: Path) -> str:
    """The text of a file whose header names the imports that its layer allows."""
    answer = header(path).rpartition(" ")[2]
    return HEADER.sub(f"{may_import(path)} Privacy depends on it: {answer}", path.read_text(), count=1)


def privacy_depends_on(path: Path) -> bool:
    """True where a mistake in the file could break the guarantee, as its header says."""
    return header(path).endswith("Privacy depends on it: yes.")


def privacy_table() -> str:
    """The files on which privacy depends, and the others, folder by folder, as their headers say."""
    folders: dict[str, dict[str, bool]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT.parent))
            folders.setdefault(folder, {})[path.name] = privacy_depends_on(path)
    lines = ["| folder | privacy depends on | privacy does not depend on |", "|---|---|---|"]
    for folder, files in sorted(folders.items()):
        needed = [f"`{name}`" for name, each in files.items() if each]
        other = [f"`{name}`" for name, each in files.items() if not each]
        if needed and other:
            lines.append(f"| `{folder}/` | {', '.join(needed)} | {', '.join(other)} |")
        else:
            lines.append(f"| `{folder}/` | {'all' if needed else ''} | {'all' if other else ''} |")
    return f"{DEPENDS}{chr(10).join(lines)}\n<!-- end -->\n"


def with_privacy_table(page: str) -> str:
    """The page about isolation with the table of files as their headers say."""
    before, _, rest = page.partition(DEPENDS)
    return before + privacy_table() + rest.partition("<!-- end -->\n")[2]


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
        state = step.init(params, key=dpfunc.rng.insecure_key(9120))
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


def has_test(name: str) -> bool:
    """True if tests/ has a file of this name in the same folder, for `clipping/rules.py` `clipping/test_rules.py`."""
    *folders, file = (part if part == "_utils" else part.lstrip("_") for part in Path(name).parts)
    return API.parent.joinpath(*folders, f"test_{file}").exists()


def is_private(name: str) -> bool:
    """True for a file that is not for users: its name, or that of a folder around it, begins with an underscore."""
    return any(part.startswith("_") and part != "__init__.py" for part in Path(name).parts)


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
    beside = {name: ROOT.parent / name for name in ("tests", "benchmarks", "examples", "docs")}
    code = {name: sum(len(path.read_text().splitlines()) for path in at.rglob("*.py")) for name, at in beside.items()}
    words = sum(len(path.read_text().split()) for path in beside["docs"].rglob("*.md"))
    mirrored = [name for name in trees if has_test(name)]
    sources = [name for name in trees if not name.endswith("__init__.py")]
    needed = [name for name in trees if privacy_depends_on(ROOT / name)]
    return {
        "files": len(trees),
        "files on which privacy depends": len(needed),
        "lines of these": sum(lines[name] for name in needed),
        "lines": sum(lines.values()),
        "modules in a circle of imports": len(circles(import_graph())),
        "lines of tests": code["tests"],
        "lines of benchmarks": code["benchmarks"],
        "lines of examples": code["examples"],
        "words of docs": words,
        "lines of the README": len((ROOT.parent / "README.md").read_text().splitlines()),
        "files with a test file of their name": f"{len(mirrored)} of {len(sources)}",
        "files on the way of a batch, after the first step": len(way),
        "lines of these files": sum(lines[name] for name in way),
        "modules that step.py imports": len(modules_imported(trees["step.py"])),
        "public names at module level": sum(len(names) for name, names in public.items() if not is_private(name)),
        "names at the top of dpfunc": len(exported),
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
    """Print the numbers, and bring the picture, the headers of files and the table of docs/isolation.md up to date."""
    PAGE.write_text(with_picture(PAGE.read_text()))
    for path in ROOT.rglob("*.py"):
        path.write_text(with_header(path))
    ISOLATION.write_text(with_privacy_table(ISOLATION.read_text()))
    table = Table("what", "number")
    way = way_of_a_batch()
    for name, value in numbers(way).items():
        table.add_row(name, str(value))
    Console().print(table)
    Console().print("The way of a batch:", ", ".join(way))
    for what, names in longest().items():
        Console().print(f"The longest {what}:", ", ".join(names))
    Console().print(privacy_table())


if __name__ == "__main__":
    main()
