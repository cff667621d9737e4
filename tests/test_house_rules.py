"""The rules of the house, read from the source: layers, bans, documentation, the pages about its files."""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import re
import runpy
from pathlib import Path

import pytest

import dpfunc
from dpfunc.engines.microbatches import Audits

ROOT = Path(dpfunc.__file__).parent
REPOSITORY, TESTS = ROOT.parent, Path(__file__).parent
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
FILES = sorted(ROOT.rglob("*.py"))
HOUSE = runpy.run_path(str(REPOSITORY / "tools" / "house.py"))

# Lower numbers are imported by higher ones; the same number never imports itself, other than within one folder.
LAYERS = {
    "errors": 0, "_utils": 1, "types": 2, "rng": 3, "batches": 3,
    "engines": 4, "clipping": 4, "noise": 4, "sampling": 4, "accounting": 4, "updates": 4, "functional": 5, "lora": 6,
    "distributed": 7, "clipped": 8, "plan": 9, "calls": 10, "state": 10, "recipes": 10, "step": 11, "checkpoint": 12,
    "rehearsal": 13, "release": 13, "evidence": 13, "budget": 13, "metrics": 14, "hf": 14, "features": 15,
    "train": 16, "cli": 17, "__init__": 18,
}  # fmt: skip
BANNED_CALLS = {
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_hook",
    "register_module_forward_hook", "setattr", "seed", "set_rng_state", "exec", "eval",
}  # fmt: skip
GLOBAL_RNG_ALLOWED = {"rng.py"}


def layer_of(path):
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py") if relative.parts[0] != "__init__.py" else "__init__"


SILENCED = ("# type: ignore", "# noqa", 'filterwarnings("ignore', 'simplefilter("ignore', "mark.skipif(")
REASON = re.compile(
    r"# type: ignore\[[a-z, -]+\]  # [\w`]|# noqa: [A-Z0-9, ]+  \(\w|(warnings|simplefilter)\(.*\),?  # \w"
)


@functools.cache
def nodes():
    """Each syntax node of each file, with its path. One test for each file took longer than its work."""
    return [(path, node) for path in FILES for node in ast.walk(ast.parse(path.read_text()))]


def layer_of_module(name):
    return name.split(".")[1] if "." in name else "__init__"


def test_imports_point_down():
    up = [
        f"{name} imports {other}"
        for name, imported in HOUSE["import_graph"]().items()
        for other in imported
        if layer_of_module(name) != layer_of_module(other)
        and LAYERS[layer_of_module(other)] >= LAYERS[layer_of_module(name)]
    ]
    assert up == []


def test_no_module_is_in_a_circle_of_imports():
    """Imports in functions count too. A pair that keeps a heavy library out of the start would be named here."""
    assert HOUSE["circles"](HOUSE["import_graph"]()) == []
    assert HOUSE["circles"]({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


def test_no_folder_is_in_a_circle_of_imports():
    """A folder imports what its own files import, and all of its files together are one part."""
    graph = HOUSE["import_graph"]()
    folders = {module.rpartition(".")[0] for module in graph if "." in module}
    found = {folder: HOUSE["circles"](HOUSE["parts_of"](folder, graph)) for folder in folders}
    assert {folder: parts for folder, parts in found.items() if parts} == {}
    pair = {"a.b.c": {"a.d"}, "a.d": {"a.b.e"}, "a.b.e": set()}
    assert HOUSE["circles"](HOUSE["parts_of"]("a", pair)) == ["a.b", "a.d"]


def test_bans():
    for path, node in nodes():
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where} assert is removed by python -O"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("everything", "Exception", "BaseException"), f"{where} catches {caught}"
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "seed" and path.name in GLOBAL_RNG_ALLOWED:
                continue  # of a stream of its own
            if called == "manual_seed":
                assert path.name in GLOBAL_RNG_ALLOWED or "generator" in ast.unparse(node.func).lower(), where
            assert called not in BANNED_CALLS or "object.__" in ast.unparse(node.func), f"{where} calls {called}"


APPLICATION = ("hf", "train", "cli")
SHOWN = {  # what a page of the reference shows, and what its list names
    name
    for page in (REPOSITORY / "docs" / "reference").glob("*.md")
    for name in re.findall(r"^(?:::: |- `)(dpfunc[\w.]+)", page.read_text(), re.MULTILINE)
}


@functools.cache
def imports_of_the_application():
    """Names of the library that hf/, train/ and cli/, which are one application, import; `_utils` is of all."""
    found = {
        f"{node.module}.{alias.name}"
        for path, node in nodes()
        if layer_of(path) in APPLICATION and isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return {name for name in found if name.startswith("dpfunc.") and name.split(".")[1] not in (*APPLICATION, "_utils")}


def test_the_application_stands_on_public_names():
    assert [name for name in imports_of_the_application() if "._" in name] == []


def test_what_the_application_stands_on_is_in_the_reference():
    """Each name, by the module that defines it, by its folder or at the top; or some names of a module."""
    missing = [
        name
        for name in imports_of_the_application()
        if not {f"{place}.{name.rpartition('.')[2]}" for place in ("dpfunc", f"dpfunc.{name.split('.')[1]}")} & SHOWN
        if not any(f"{shown}.".startswith(f"{name}.") or name.startswith(f"{shown}.") for shown in SHOWN)
    ]
    assert missing == []


def test_no_mechanism_of_noise_is_named_where_each_works():
    """A step, its state, its plan, ledgers and checkpoints know the protocol of noise, and no mechanism."""
    known = {"Mechanism", "Noise", "Run", "Turn"}
    mechanisms = set(dpfunc.noise.__all__) - known
    places = {"step.py", "state.py", "plan.py", "ledger.py"}
    named = [
        f"{path.name} names {name}"
        for path, node in nodes()
        if path.name in places or path.parent.name == "checkpoint"
        for name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
        if name in mechanisms
    ]
    assert named == []
    assert {"Gaussian", "add_gaussian"} <= mechanisms


def test_no_foreign_attribute_is_written():
    """Attributes are written on self (in the class's own methods) and nowhere else; but an optimizer reads `.grad`, and
    the context of a custom function of torch is made for it."""
    for path, node in nodes():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            for target in targets:
                if isinstance(target, ast.Attribute):
                    if target.attr == "grad" and layer_of(path) == "updates":
                        continue
                    assert ast.unparse(target.value) in ("self", "ctx"), (
                        f"{path}:{node.lineno} writes {ast.unparse(target)}"
                    )


MEMORIES = {
    "ContextVar", "WeakIdKeyDictionary", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "RLock", "Lock", "local",
    "count", "deque", "defaultdict", "OrderedDict", "Counter", "dict", "list", "set",
}  # fmt: skip


def remembers(value):
    """True for an expression that makes a container that is empty, or one of those that are filled later."""
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in MEMORIES and not (name in ("dict", "list", "set", "deque") and value.args)


def test_hidden_memory_is_named():
    """Modules remember what a decision names, with its reason, and nothing else."""
    found = {
        (target.id, str(path.relative_to(ROOT)))
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and remembers(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    page = (REPOSITORY / "docs/decisions/0020-what-a-process-remembers.md").read_text()
    assert found == set(re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", page, re.M))


def test_public_functions_take_no_unnamed_options():
    for path, node in nodes():
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.args.kwarg:
            assert node.name in ("forward",), f"{path}:{node.lineno} {node.name} swallows **{node.args.kwarg.arg}"


def test_public_names():
    """The public API; a change here is a change of the API and belongs into the changelog."""
    assert len(dpfunc.__all__) <= 15
    snapshot = (TESTS / "public_api.txt").read_text().split()
    assert sorted(dpfunc.__all__) == snapshot


FOLDERS = ("accounting", "clipping", "engines", "functional", "noise", "sampling", "updates")
PUBLIC = {
    f"{where.__name__}.{name}": value
    for where in (dpfunc, dpfunc.clipped, dpfunc.rng, dpfunc.state, *(getattr(dpfunc, name) for name in FOLDERS))
    for name in getattr(where, "__all__", ("Key", "StepState", "clipped_grad", "fold_in", "insecure_key"))
    if inspect.isfunction(value := getattr(where, name, None)) or inspect.isclass(value)
}
SHORT = {  # tuples that are returned, protocols, and rules of one formula: no example, or not each argument
    "accounting.BatchChoice", "accounting.DeltaMeaning", "accounting.EpsilonMeaning", "accounting.Requirements",
    "clipping.auto_v", "clipping.normalized", "functional.Forward", "functional.Functional", "noise.Noise",
    "noise.Recursion", "noise.Strategy", "noise.Toeplitz", "sampling.Sampler", "sampling.deal",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    """A sentence, an example, and each argument of a function."""
    value = PUBLIC[name]
    doc = inspect.getdoc(value) or ""
    assert doc.splitlines()[0].endswith((".", ":")), "the first line is a sentence"
    examples = doctest.DocTestParser().get_examples(doc)
    arguments = inspect.signature(value).parameters if inspect.isfunction(value) else ()
    whole = bool(examples) and all(argument in doc for argument in arguments)
    assert whole != (name.removeprefix("dpfunc.") in SHORT), "no example, or an argument that it does not name"


def test_every_module_says_what_it_is_what_it_imports_and_whether_privacy_depends_on_it():
    """The second paragraph of a module is `May import: ... Privacy depends on it: yes.` (or no); see `make house`."""
    wrong = []
    for path in FILES:
        paragraphs = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
        expected = [f"{HOUSE['may_import'](path)} Privacy depends on it: {answer}." for answer in ("yes", "no")]
        if len(paragraphs) < 2 or paragraphs[1] not in expected:
            wrong.append(f"{path.relative_to(ROOT)}: after its first sentence: {expected[0]}")
    assert wrong == []


def test_tests_named_in_docstrings_exist():
    """A guarantee names its test; the test must be there."""
    sources = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    for path in FILES:
        for word in path.read_text().replace("(", " ").replace(")", " ").replace(",", " ").replace(";", " ").split():
            name = word.strip("`.:")
            if name.startswith("tests/"):
                file = name.split("::")[0]
                assert (REPOSITORY / file).exists(), f"{path} names {file}"
            if name.startswith("test_") or "::test_" in name:
                function = name.split("::")[-1]
                if not function.endswith("_py"):
                    assert any(f"def {function}" in text for text in sources.values()), f"{path} names {function}"


def test_what_tests_import_from_a_file_is_in_it():
    """Who renames a private name runs the tests of some folders: those of another one would end at their import."""
    imported = re.compile(r"^ *from (dpfunc[\w.]+) import (?:\(([^)]*)\)|([\w, ]+))", re.M)
    missing = []
    for path in TESTS.rglob("*.py"):
        for module, several, one in imported.findall(path.read_text()):
            place = REPOSITORY.joinpath(*module.split("."))
            source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            known = {*re.findall(r"\w+", source.read_text()), *(each.stem for each in place.glob("*"))}
            names = [each.split()[0] for each in re.sub("#.*", "", several or one).split(",") if each.strip()]
            missing += [f"{path.name} imports {name} from {module}" for name in names if name not in known]
    assert missing == []


def test_what_is_silenced_has_a_reason():
    """A rule that is not kept, a warning that is not shown or a test that is not run says why, beside it.

    Of warnings, the line above may say it. A mark of a test names the warning.
    """
    silent = []
    for folder in ("dpfunc", "tests", "benchmarks", "tools", "examples"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            lines = path.read_text().splitlines()
            for number, line in enumerate(lines):
                if path != Path(__file__) and any(word in line for word in SILENCED):
                    skipped = "skipif" in line and 'reason="' in "".join(lines[number : number + 4])
                    above = "warnings" in line and lines[number - 1].lstrip().startswith("# ")
                    named = '.mark.filterwarnings("ignore")' not in line
                    if not (named and (above or skipped or REASON.search(line))):
                        silent.append(f"{path}:{number + 1}: {line.strip()}")
    assert silent == []


def test_slow_tests_are_marked_in_their_files():
    """`make test-slow` collects the files that have the mark, and no others."""
    assert [path for path in TESTS.rglob("*.py") if "mark.slow" in path.read_text() and path.name[:5] != "test_"] == []


# docs/architecture.md and docs/isolation.md

NAMES = set(re.findall(r"`([a-z_*/.]+)`", PAGE)) - {"params", "batch", "state"}
BASES = [ROOT, ROOT / "engines", ROOT / "checkpoint", ROOT / "hf"]


def paths(name):
    """Files and folders of a name on the page, with or without its ending and the folder that a section is about."""
    whole = name if "." in name or name.endswith("/") else f"{name}.py"
    return [path for base in BASES for path in base.glob(whole)]


def test_what_the_page_names_is_there():
    assert not [name for name in sorted(NAMES) if not paths(name) and name not in dpfunc.__all__]


def test_the_page_about_rows_names_files_and_tests_that_are_there():
    """docs/isolation.md: code in dpfunc/engines/, tests in tests/engines/."""
    page = (REPOSITORY / "docs" / "isolation.md").read_text()
    lines = page.replace(HOUSE["privacy_table"](), "").splitlines()  # that list names files of all folders
    rows = [line.strip("| ").split(" | ") for line in lines if line.count(" | ") == 2 and ".py" in line]
    assert len(rows) > 15
    code = {name for _, column, _ in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", column)}
    named = {name for *_, column in rows for name in re.findall(r"`([\w/]+\.py(?:::\w+)?)`", column)} - {
        "tests/reference.py"
    }
    assert not [name for name in code if not (ROOT / "engines" / name).exists()]
    for name in named:
        file, _, test = name.partition("::")
        assert f"def {test}" in (TESTS / "engines" / file).read_text(), name


def test_every_file_has_its_place():
    named = {path for name in NAMES for path in paths(name)} - {ROOT / "engines", ROOT / "checkpoint"}
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py" and not named & {path, *path.parents}
    ]
    assert not missing


def test_the_picture_is_that_of_the_imports():
    """`make house` writes it."""
    assert HOUSE["with_picture"](PAGE) == PAGE


def test_the_page_about_rows_lists_the_files_on_which_privacy_depends():
    """`make house` writes the list from the headers."""
    page = (REPOSITORY / "docs" / "isolation.md").read_text()
    assert "dpfunc/noise" in page
    assert HOUSE["with_privacy_table"](page) == page


def test_complexity_counts_branches_of_a_function_alone():
    source = "def f(x):\n    if x and x > 1:\n        return [y for y in x if y]\n    def g(z):\n        if z:\n            pass\n"
    tree = ast.parse(source)
    assert [HOUSE["complexity"](function) for function in HOUSE["functions"](tree)] == [5, 2]


def test_the_way_of_a_batch_begins_in_the_step(monkeypatch):
    monkeypatch.setattr(Audits, "due", lambda *_: 0)  # by time and chance, a later step compares a row
    way = HOUSE["way_of_a_batch"]()
    assert "step.py" in way[:2]
    assert "engines/vmap_grad.py" in way
    # where another test has imported FSDP, each call looks for it
    assert len(set(way) - {"functional/fsdp.py"}) <= 27, way
    HOUSE["numbers"].__globals__["AROUND"] = ()  # to read all tests takes longer than all else
    assert int(HOUSE["numbers"](way)["files on the way of a batch, after the first step"]) == len(way)
