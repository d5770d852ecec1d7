"""The coding rules of this project, checked on the syntax tree of every module.

Each rule is a function from a module to its findings, and each has invalid snippets below in which it must find
something: a rule that cannot fail checks nothing. Each rule states what it forbids, where, and why.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
CITATION: Final = re.compile(r"(?<![\w/])(docs/[\w/-]+\.md)(?:#([\w-]+))?")
FOREIGN_CITATION: Final = re.compile(r"(?i)reference,? (sections? )?\d|reference of \d|\(reference\s?:|\bseed 00\d")

# Modules without a test module of their own name, each with the reason.
TESTED_ELSEWHERE: Final[dict[str, str]] = {
    "src/flowstone/iproto/constants.py": "numbers and names only; every decoder's test reads them",
    "src/flowstone/iproto/error_codes.py": "the table behind errors.py, whose test reads all of it",
    "src/flowstone/iproto/limits.py": "numbers only; each limit is tested where it bites",
    "src/flowstone/box/engine/key_parts.py": "numbers only; test_key_kernels.py reads them",
    "src/flowstone/box/update/bulk.py": "the buffers of kernels.py, whose test allocates them",
    "src/flowstone/xlog/block_table.py": "the table that walk.py fills; its test reads it",
    "src/flowstone/text/flow_shapes.py": "numbers only; tests/native/test_headers.py reads them",
    "src/flowstone/text/flow_text_kernels.py": "the inside of flow_text.py, whose test runs it both ways",
    "src/flowstone/text/json_limits.py": "numbers only; tests/native/test_headers.py reads them",
    "src/flowstone/text/json_row_names.py": "numbers only; tests/native/test_headers.py reads them",
    "src/flowstone/text/json_rows_kernels.py": "the inside of json_rows.py, whose test runs it both ways",
    "src/flowstone/text/json_text_kernels.py": "the inside of json_text.py, whose test runs it both ways",
    "src/flowstone/text/powers_of_ten.py": "a table; test_float_text.py reads it",
    "src/flowstone/limestone/format/entry_table.py": "numbers only; tests/native/test_headers.py reads them",
    "src/flowstone/limestone/format/log_scan_kernels.py": "the inside of log_scan.py, whose test runs it both ways",
    "src/flowstone/limestone/format/packing_kernels.py": "the inside of packing.py, whose test runs it both ways",
    "src/flowstone/limestone/format/transcode_kernels.py": "the inside of transcode.py, whose test runs it both ways",
    "src/flowstone/limestone/store/winner_kernels.py": "the inside of latest_entries.py, whose test runs it both ways",
    "src/flowstone/limestone/store/winner_table.py": "numbers only; tests/native/test_headers.py reads them",
    "src/flowstone/limestone/tsurugi/row_kernels.py": "the inside of row_columns.py, whose test runs it both ways",
    "src/flowstone/limestone/tsurugi/row_layout.py": "numbers only; tests/native/test_headers.py reads them",
    "src/flowstone/columns/column_limits.py": "numbers only; test_column_kernels.py meets each limit",
}


@dataclass(frozen=True)
class Module:
    """A Python file: its path relative to the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def room(self) -> str | None:
        """The package below `flowstone` that contains the module; None for other modules."""
        parts = self.path.split("/")
        return parts[2] if parts[:2] == ["src", "flowstone"] and len(parts) > 3 else None


Finding = tuple[int, str]
Check = Callable[[Module], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    applies: Callable[[Module], bool]
    check: Check


RULES: Final[dict[str, Rule]] = {}


def rule(applies: Callable[[Module], bool]) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES[check.__name__] = Rule(applies, check)
        return check

    return register


# --- where rules apply ---------------------------------------------------------------------------

PURE_ROOMS: Final = frozenset({"replication", "box", "iproto", "text", "columns"})
PURE_MODULES: Final = frozenset(
    f"src/flowstone/limestone/{name}.py"
    for name in (
        "format/endpoint format/entries format/entry_table format/entry_table_kernels format/entry_walk "
        "format/log_scan format/log_scan_kernels format/messages format/names format/packing format/packing_kernels "
        "format/transcode format/transcode_kernels format/wire_extensions replica/epoch_commits store/epochs "
        "store/latest_entries store/winner_kernels store/winner_table "
        "tsurugi/definitions tsurugi/metadata tsurugi/protobuf tsurugi/row_columns tsurugi/row_kernels "
        "tsurugi/row_layout tsurugi/row_reader tsurugi/sql_schema"
    ).split()
)
DOOR_ROOMS: Final = frozenset({"xlog", "history", "node", "archive", "replica", "client", "limestone"})


def everywhere(module: Module) -> bool:
    return True


def in_src(module: Module) -> bool:
    return module.path.startswith("src/")


def pure(module: Module) -> bool:
    return module.room in PURE_ROOMS or module.path in PURE_MODULES


def behind_the_door(module: Module) -> bool:
    return module.room in DOOR_ROOMS


def pure_or_behind_the_door(module: Module) -> bool:
    return pure(module) or behind_the_door(module)


# --- the world ------------------------------------------------------------------------------------

WORLD_MODULES: Final = frozenset(
    "concurrent fcntl glob mmap multiprocessing os pathlib random secrets select selectors shutil "
    "signal socket socketserver ssl subprocess tempfile threading time urllib".split()
)

# Attributes, by module, that bypass `outside/`.
WORLD_NAMES: Final[dict[str, frozenset[str]]] = {
    "asyncio": frozenset(
        "to_thread sleep open_connection open_unix_connection start_server start_unix_server "
        "create_subprocess_exec create_subprocess_shell".split()
    ),
    "uuid": frozenset({"uuid1", "uuid4"}),
    "io": frozenset({"open", "open_code", "FileIO"}),
    "datetime": frozenset({"now", "utcnow", "today"}),
    "date": frozenset({"today"}),
    "np": frozenset({"memmap", "fromfile", "random"}),
    "numpy": frozenset({"memmap", "fromfile", "random"}),
    "sys": frozenset({"argv", "stdin", "stdout", "stderr"}),
}

# These return tasks in the order of a set, which a seed does not determine.
UNORDERED_ASYNCIO: Final = frozenset({"wait", "as_completed", "TaskGroup"})


def imported(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Yield each imported module, with the name imported from it, if any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def last_name(node: ast.expr | None) -> str | None:
    """`b` of `a.b`, `a` of `a` and of `a[…]`."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def used_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield uses of `module.name`, and imports `from module import name`."""
    for line, module, name in imported(tree):
        if name is not None:
            yield line, module, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, last_name(node.value) or "…", node.attr


def calls(tree: ast.AST, *names: str) -> Iterator[tuple[int, str]]:
    """Yield calls of a bare name, as for builtins."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node.lineno, node.func.id


@rule(pure_or_behind_the_door)
def no_import_of_the_world(module: Module) -> Iterator[Finding]:
    for line, name, _ in imported(module.tree):
        if name.split(".")[0] in WORLD_MODULES:
            yield line, f"imports {name}; the world is reached through the Outside one is handed"


@rule(pure_or_behind_the_door)
def no_way_around_the_door(module: Module) -> Iterator[Finding]:
    for line, owner, name in used_names(module.tree):
        if name in WORLD_NAMES.get(owner, ()) or name == "run_in_executor":
            yield line, f"uses {owner}.{name}; the world is reached through the Outside one is handed"
    for line, name in calls(module.tree, "open", "input", "run_in_executor"):
        yield line, f"calls {name}(); the world is reached through the Outside one is handed"


@rule(pure)
def no_asyncio_in_pure_rooms(module: Module) -> Iterator[Finding]:
    for line, name, _ in imported(module.tree):
        if name.split(".")[0] in {"asyncio", "uvloop"}:
            yield line, f"imports {name}; this room takes events and returns actions"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncFunctionDef):
            yield node.lineno, f"{node.name} is a coroutine; this room takes events and returns actions"


@rule(behind_the_door)
def no_unordered_tasks(module: Module) -> Iterator[Finding]:
    for line, owner, name in used_names(module.tree):
        if owner == "asyncio" and name in UNORDERED_ASYNCIO:
            yield line, f"uses asyncio.{name}, whose order no seed can repeat"


# --- state and order ------------------------------------------------------------------------------

MUTABLE_CALLS: Final = frozenset(
    "list dict set bytearray defaultdict deque Counter OrderedDict WeakValueDictionary "
    "WeakKeyDictionary WeakSet ContextVar count".split()
)
MUTATING_METHODS: Final = frozenset(
    "add append appendleft clear discard extend insert pop popitem remove setdefault sort update".split()
)
MUTABLE_LITERALS: Final = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def is_mutable(value: ast.expr | None) -> bool:
    return isinstance(value, MUTABLE_LITERALS) or (
        isinstance(value, ast.Call) and last_name(value.func) in MUTABLE_CALLS
    )


def is_empty(value: ast.expr) -> bool:
    """Return True for an empty container, which exists to be filled."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    return isinstance(value, ast.Call) and not value.args and not value.keywords


def written_in_functions(tree: ast.AST) -> Iterator[str]:
    """Return names of containers that a function changes in place."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if node.func.attr in MUTATING_METHODS else None
        if isinstance(changed, ast.Name):
            yield changed.id


@rule(pure_or_behind_the_door)
def no_state_in_modules(module: Module) -> Iterator[Finding]:
    """Forbid mutable module state: two nodes in one process share the module.

    A container in UPPER_CASE that is filled at its definition and never changed is a table, and allowed."""
    written = frozenset(written_in_functions(module.tree))
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = last_name(target) or "?"
            table = name.isupper() and not is_empty(node.value) and name not in written
            if is_mutable(node.value) and not table and name != "__all__":
                yield node.lineno, f"{name} is state of the module; give it to an object, or make it a table"
    for inner in ast.walk(module.tree):
        if isinstance(inner, ast.Global):
            yield inner.lineno, f"global {', '.join(inner.names)}: state of the module"


ORDER_FREE: Final = frozenset(["sorted", "any", "all", "sum", "min", "max", "len", "set", "frozenset"])
ORDERED_BY_ARGUMENT: Final = frozenset(["list", "tuple", "iter", "enumerate", "zip", "map", "filter", "deque"])
SET_TYPES: Final = frozenset({"set", "frozenset", "Set", "AbstractSet", "MutableSet"})


def known_sets(tree: ast.AST) -> Iterator[str]:
    """Return the source text of names and attributes that are declared or filled as sets in this tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and last_name(node.annotation) in SET_TYPES:
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and is_set(node.value, frozenset()):
            yield from (ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.arg) and last_name(node.annotation) in SET_TYPES:
            yield node.arg


def is_set(node: ast.expr, sets: frozenset[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in {"set", "frozenset"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor | ast.Sub):
        return is_set(node.left, sets) or is_set(node.right, sets)
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in sets


def iterated(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the iterables in this tree whose order is visible afterwards."""
    order_free: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in ORDER_FREE:
                order_free.update(node.args)
            elif name in ORDERED_BY_ARGUMENT or name in {"join", "extend"}:
                yield from node.args
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield node.iter
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp) and node not in order_free:
            yield from (generator.iter for generator in node.generators)
        elif isinstance(node, ast.Starred):
            yield node.value


@rule(pure_or_behind_the_door)
def no_iteration_over_sets(module: Module) -> Iterator[Finding]:
    """Forbid iteration over sets: their order differs between runs, and so would messages and files; sort them."""
    functions = [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    attributes = frozenset(name for name in known_sets(module.tree) if "." in name)
    found: dict[tuple[int, int], Finding] = {}
    for tree in (*functions, module.tree):
        # Plain names are resolved per function: elsewhere the same name may be a list.
        local = known_sets(tree) if tree is not module.tree else iter(())
        sets = attributes | frozenset(local)
        for node in iterated(tree):
            if is_set(node, sets):
                finding = (node.lineno, f"iterates over the set {ast.unparse(node)}; sort it")
                found[node.lineno, node.col_offset] = finding
    yield from found.values()


# --- every module ---------------------------------------------------------------------------------

UNFINISHED: Final = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH: Final = re.compile(r"(?<![\w.}])/(home|root|Users|work|opt|srv|mnt)/\w")


@rule(everywhere)
def a_docstring_on_the_door(module: Module) -> Iterator[Finding]:
    empty_marker = module.path.startswith("tests/") and not module.text.strip()
    if not ast.get_docstring(module.tree) and not empty_marker:
        yield 1, "has no docstring"


@cache
def headings(page: str) -> frozenset[str]:
    """Return the anchors of a page of the documentation, in the form of mkdocs."""
    text = re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text())
    found = re.findall(r"(?m)^#+ +(.+?) *$", text)
    return frozenset(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in found)


@rule(everywhere)
def citations_resolve(module: Module) -> Iterator[Finding]:
    """Require that pages and headings cited in docstrings and comments exist."""
    for number, line in enumerate(module.text.splitlines(), 1):
        for page, anchor in CITATION.findall(line):
            if not (ROOT / page).is_file():
                yield number, f"cites {page}, which does not exist"
            elif anchor and anchor not in headings(page):
                yield number, f"cites {page}#{anchor}, which is no heading of that page"
        if match := FOREIGN_CITATION.search(line):
            yield number, f"cites {match[0]!r}, which the repository does not have; cite a heading of docs/spec/"


@rule(everywhere)
def nothing_unfinished(module: Module) -> Iterator[Finding]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if match := UNFINISHED.search(line):
            yield number, f"says {match[0]}; finish it or open an issue"


@rule(everywhere)
def no_path_of_one_machine(module: Module) -> Iterator[Finding]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if match := MACHINE_PATH.search(line):
            yield number, f"names the path {match[0]}…, which other machines do not have"


@rule(in_src)
def no_code_from_data(module: Module) -> Iterator[Finding]:
    for line, name, _ in imported(module.tree):
        if name.split(".")[0] in {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}:
            yield line, f"imports {name}, which runs what it reads"
    for line, name in calls(module.tree, "eval", "exec", "compile", "__import__"):
        yield line, f"calls {name}()"


# --- rules on the whole tree -------------------------------------------------------------------------------


def modules() -> list[Module]:
    paths = sorted(
        path
        for top in ("src", "tests", "bench")
        for path in (ROOT / top).rglob("*.py")
        if "__pycache__" not in path.parts
    )
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths]


MODULES: Final = modules()


@pytest.mark.parametrize("name", RULES)
def test_every_module_follows_the_rules(name: str) -> None:
    rule = RULES[name]
    findings = [
        f"{module.path}:{line}: {message}"
        for module in MODULES
        if rule.applies(module)
        for line, message in rule.check(module)
    ]
    assert not findings, "\n" + "\n".join(findings)


def untested(sources: list[str], tests: list[str], elsewhere: dict[str, str]) -> list[str]:
    """Return modules of a package without a test module of a matching name."""
    missing = []
    for source in sources:
        room, _, name = source.removeprefix("src/flowstone/").rpartition("/")
        if not room or name == "__init__.py" or source in elsewhere:
            continue
        wanted = re.compile(rf"tests/{room}/test_\w*{re.escape(name.removesuffix('.py').strip('_'))}\w*\.py")
        if not any(wanted.fullmatch(test) for test in tests):
            missing.append(source)
    return missing


def test_every_module_has_a_test_module() -> None:
    paths = [module.path for module in MODULES]
    sources = [path for path in paths if path.startswith("src/")]
    missing = untested(sources, paths, TESTED_ELSEWHERE)
    assert not missing, "no test module for\n" + "\n".join(missing)
    assert sorted(set(TESTED_ELSEWHERE) - set(sources)) == [], "exemptions of modules that no longer exist"


SOURCE: Final = "src/flowstone/"
MODULES_MAX: Final = 25
"""More modules than a reader can take in at a glance."""


def crowded(paths: list[str], limit: int) -> list[str]:
    """Return source directories with more modules than `limit`, not counting `__init__.py`."""
    rooms = [path.rpartition("/")[0] for path in paths if path.startswith("src/") and not path.endswith("__init__.py")]
    return sorted({f"{room}: {rooms.count(room)} modules" for room in rooms if rooms.count(room) > limit})


def test_directories_have_a_limited_number_of_modules() -> None:
    found = crowded([module.path for module in MODULES], MODULES_MAX)
    assert not found, "\n" + "\n".join(found)


SAME_NAME: Final[dict[str, str]] = {
    "Client": "flowstone.Client is what applications call so; outside/network.py has that of a listener",
    "Replica": "both are public: flowstone.Replica follows a server, flowstone.limestone.Replica receives",
}


def repeated_classes(modules: list[Module], same_name: dict[str, str]) -> list[str]:
    """Return names of public classes that several modules define."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        if module.path.startswith("src/"):
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(module.path)
    return [f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1 and name not in same_name]


def test_public_class_names_are_unique() -> None:
    found = repeated_classes(MODULES, SAME_NAME)
    assert not found, "\n" + "\n".join(found)


_MODULE_IN_TEXT: Final = re.compile(r"`([\w/]+\.py)`")


def unresolved_modules(modules: list[Module]) -> list[str]:
    """Return modules named in backticks that are neither in the same directory nor given with their path."""
    sources = [module for module in modules if module.path.startswith(SOURCE)]
    paths = {module.path.removeprefix(SOURCE) for module in sources}
    return [
        f"{module.path}:{line}: no {name} here; write the path below {SOURCE}"
        for module in sources
        for line, text in enumerate(module.text.splitlines(), 1)
        for name in _MODULE_IN_TEXT.findall(text)
        if not {name, (PurePosixPath(module.path).parent / name).as_posix().removeprefix(SOURCE)} & paths
    ]


def test_modules_named_in_text_exist() -> None:
    found = unresolved_modules(MODULES)
    assert not found, "\n" + "\n".join(found)


UNUSED_HERE: Final[dict[str, str]] = {
    "STARTUP": "the original's own mode of reading; tests compare with the original by it",
    "DELTA_CONF": "sessions on clusters need it",
    "UNSIGNED_TEXT_MAX": "room that callers of the kernel need",
    "changes_of": "the counterpart of `at`",
    "connection_count": "tests and debuggers",
    "data_received": "asyncio calls it",
    "decode_all": "the counterpart of an encoder",
    "encode_ballot_body": "the counterpart of a decoder",
    "handle_error": "socketserver calls it",
    "is_subscribed": "tests and debuggers",
    "pair_count": "tests and debuggers",
    "pause_writing": "asyncio calls it",
    "reportLatestOffset": "Spark calls it",
    "resume_writing": "asyncio calls it",
    "to_datetime": "for users of the values",
    "unread_size": "tests and debuggers",
    "wire_entry": "the counterpart of a decoder",
}
"""Names that nothing in the source uses, each with the reason why it is there."""

BY_NAME: Final = ("_make_",)
"""Prefixes of methods that are looked up by name."""


def defined_names(module: Module) -> Iterator[str]:
    """Yield names defined in a module, except decorated ones: a decorator may register them elsewhere."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("__"):
            continue
        if all(last_name(each) in {"property", "staticmethod", "classmethod"} for each in node.decorator_list):
            yield node.name
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def dead_names(modules: list[Module], pages: str, unused_here: dict[str, str]) -> list[str]:
    """Return names that are defined in the source and used nowhere else, except in tests."""
    words = Counter(
        word
        for module in modules
        if not module.path.startswith("tests/")
        for word in re.findall(r"[A-Za-z_]\w*", module.text)
    )
    words.update(re.findall(r"[A-Za-z_]\w*", pages))
    return [
        f"{module.path}: {name}"
        for module in modules
        if module.path.startswith("src/")
        for name in defined_names(module)
        if words[name] == 1 and name not in unused_here and not name.startswith(BY_NAME)
    ]


def test_every_defined_name_is_used() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    found = dead_names(MODULES, pages, UNUSED_HERE)
    assert not found, "\n" + "\n".join(found)


# --- the rules find violations ---------------------------------------------------------------------------

DOC: Final = '"""A room."""\n'
XLOG: Final = "src/flowstone/xlog/example.py"
NODE: Final = "src/flowstone/node/example.py"
BOX: Final = "src/flowstone/box/example.py"
CLI: Final = "src/flowstone/cli/example.py"

BAD: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "no_import_of_the_world": (
        *((XLOG, f"import {name}") for name in sorted(WORLD_MODULES)),
        (BOX, "import os"),
        (BOX, "from time import monotonic"),
        ("src/flowstone/limestone/store/epochs.py", "import random"),
        ("src/flowstone/history/example.py", "def f():\n    import os.path"),
        (NODE, "from os import urandom"),
        (NODE, "import concurrent.futures"),
    ),
    "no_way_around_the_door": (
        (NODE, "await_ = asyncio.to_thread(f)"),
        (NODE, "from asyncio import to_thread"),
        (NODE, "loop.run_in_executor(None, f)"),
        (NODE, "asyncio.get_running_loop().run_in_executor(None, f)"),
        (NODE, "async def f():\n    await asyncio.sleep(1)"),
        (NODE, "x = uuid.uuid4()"),
        (BOX, "from uuid import uuid4"),
        (XLOG, "with open('x') as file: pass"),
        (XLOG, "file = io.open('x')"),
        (XLOG, "when = datetime.datetime.now(UTC)"),
        (XLOG, "salt = np.random.bytes(3)"),
    ),
    "no_asyncio_in_pure_rooms": (
        (BOX, "import asyncio"),
        (BOX, "from asyncio import Queue"),
        ("src/flowstone/replication/example.py", "async def f(): pass"),
        ("src/flowstone/limestone/store/epochs.py", "import asyncio"),
    ),
    "no_unordered_tasks": (
        *((NODE, f"asyncio.{name}(tasks)") for name in sorted(UNORDERED_ASYNCIO)),
        (NODE, "from asyncio import TaskGroup"),
    ),
    "no_state_in_modules": (
        (XLOG, "cache = {}"),
        (XLOG, "CACHE = {}"),
        (XLOG, "names: list[str] = []"),
        (XLOG, "cache: Final = {}"),
        (XLOG, "CACHE: Final = dict()"),
        (XLOG, "names = {1: 'a'}"),
        (XLOG, "NAMES = {1: 'a'}\ndef f():\n    NAMES[2] = 'b'"),
        (XLOG, "NAMES = ['a']\ndef f():\n    NAMES.append('b')"),
        (BOX, "seen = set()"),
        (BOX, "queue = collections.deque()"),
        (NODE, "def f():\n    global count\n    count = 1"),
    ),
    "no_iteration_over_sets": (
        (BOX, "for x in {1, 2}: pass"),
        (BOX, "y = [x for x in set(z)]"),
        (BOX, "y = list(set(z))"),
        (BOX, "y = [*{1, 2}]"),
        (BOX, "y = ', '.join({a for a in b})"),
        (BOX, "def f(z: set[int]):\n    for x in z: pass"),
        (BOX, "def f():\n    z = set()\n    return tuple(z)"),
        (BOX, "def f(a, b):\n    return [x for x in set(a) - b]"),
        (NODE, "class A:\n def f(self):\n  self.z: set[int] = set()\n def g(self):\n  for x in self.z: pass"),
    ),
    "a_docstring_on_the_door": (("tests/test_example.py", "import pytest"),),
    "citations_resolve": (
        (CLI, "# docs/spec/" + "nothing.md"),
        (CLI, "# docs/spec/" + "files.md#no-such-heading"),
        (CLI, "# refer" + "ence section 14.5"),
        (CLI, "# (refer" + "ence: epoch file)"),
    ),
    "nothing_unfinished": ((CLI, "# TO" + "DO: later"), (CLI, "x = 1  # FIX" + "ME")),
    "no_path_of_one_machine": ((CLI, "x = '/" + "home/someone'"), (CLI, "# see /" + "work/x")),
    "no_code_from_data": (
        (CLI, "import pickle"),
        (CLI, "from pickle import loads"),
        (CLI, "eval('1')"),
        (CLI, "exec('1')"),
    ),
}

GOOD: Final = (
    (XLOG, "import asyncio\nimport io\nfrom uuid import UUID\nbuffer = io.BytesIO"),
    (XLOG, "__all__ = ['a']\nNAMES: Final = {1: 'a'}\nTYPES = {v: k for k, v in x}\nKINDS = ('a',)"),
    (XLOG, "def f(disk):\n    with disk.open('x') as file:\n        return sorted({1, 2})"),
    (XLOG, "def f():\n    z = set()\n    return any(x for x in z), 3 in z, len(z)"),
    (XLOG, "def f():\n    z = set()\ndef g(z: list[int]):\n    return list(z)"),
    (NODE, "async def f(outside):\n    await outside.clock.sleep(1)\n    return outside.random.uuid()"),
    (NODE, "async def f(a, b):\n    await asyncio.gather(a, b)"),
    ("src/flowstone/outside/example.py", "import os\nimport time\nopen('x')"),
    (CLI, "import os\nimport signal\nPATH = 'tests/tmp/x'"),
)


def test_every_rule_has_a_violating_snippet() -> None:
    assert sorted(BAD) == sorted(RULES)


@pytest.mark.parametrize(
    ("name", "path", "snippet"),
    [(name, path, snippet) for name, snippets in BAD.items() for path, snippet in snippets],
)
def test_rule_finds_its_violation(name: str, path: str, snippet: str) -> None:
    text = snippet if name == "a_docstring_on_the_door" else DOC + snippet
    module = Module(path, text)
    assert RULES[name].applies(module)
    assert list(RULES[name].check(module))


@pytest.mark.parametrize(("path", "snippet"), GOOD)
def test_rules_accept_valid_code(path: str, snippet: str) -> None:
    module = Module(path, DOC + snippet)
    assert [finding for rule in RULES.values() if rule.applies(module) for finding in rule.check(module)] == []


def test_a_module_without_a_test_module_is_found() -> None:
    source = "src/flowstone/xlog/block.py"
    assert untested([source], ["tests/xlog/test_reader.py", "tests/box/test_block.py"], {}) == [source]
    assert untested([source], ["tests/xlog/test_block.py"], {}) == []
    assert untested([source], ["tests/xlog/test_block_damage.py"], {}) == []
    assert untested([source], [], {source: "it is a table"}) == []


def test_a_crowded_directory_is_found() -> None:
    paths = [f"src/flowstone/xlog/module_{number}.py" for number in range(3)]
    assert crowded([*paths, "src/flowstone/xlog/__init__.py"], 3) == []
    assert crowded(paths, 2) == ["src/flowstone/xlog: 3 modules"]


def test_a_repeated_class_name_is_found() -> None:
    both = [Module(XLOG, "class Place: pass"), Module(BOX, "class Place: pass\nclass _Own: pass")]
    assert repeated_classes([*both, Module(NODE, "class _Own: pass")], {}) == [f"Place: {XLOG}, {BOX}"]
    assert repeated_classes(both, {"Place": "a reason"}) == []


def test_missing_module_named_in_text_is_found() -> None:
    def named(text: str) -> list[str]:
        return unresolved_modules([Module(XLOG, f"# in `{text}`"), Module("src/flowstone/box/box.py", "")])

    assert named("box/box.py") == named(PurePosixPath(XLOG).name) == []
    assert named("box.py") == [f"{XLOG}:1: no box.py here; write the path below src/flowstone/"]


def test_unused_name_is_found() -> None:
    tested = Module("tests/xlog/test_example.py", "f()\nSIZE")
    module = Module(XLOG, "SIZE = 3\ndef f():\n    return g()\ndef g(): pass\n@command\ndef h(): pass")
    assert dead_names([module, tested], "", {}) == [f"{XLOG}: f", f"{XLOG}: SIZE"]
    assert dead_names([module, tested], "call f", {"SIZE": "a reason"}) == []
