"""What holds for the code as a whole: who may import whom, which calls never appear, how long a file may be, and that every module has its tests."""

import ast
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.helpers import REPOSITORY

PACKAGE = REPOSITORY / "mtkit"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80

LAYERS = ("base", "data", "native", "model", "checkpoint", "decoding", "evaluation", "training", "benchmark", "cli")
"""A module imports from its own layer and from those before it."""

BASE = ("errors", "config", "faults", "files", "artefacts", "signals", "cores", "distributed")
SLOW_IMPORTS = {"torch", "datasets", "sentencepiece", "sacrebleu"}
"""What a command may import only once it runs."""

TORCH_FREE = {"data", "evaluation"}
TORCH_ALLOWED = {"mtkit.data.loader", "mtkit.data.packing"}

FORBIDDEN_IMPORTS = {
    "pickle": "it runs code from files",
    "cPickle": "it runs code from files",
    "dill": "it runs code from files",
    "cloudpickle": "it runs code from files",
    "joblib": "it runs code from files",
    "shelve": "it runs code from files",
    "marshal": "it reads untrusted bytes unsafely",
    "click": "typer carries its own",
    "argparse": "the command line is typer's",
    "yaml": "configs are TOML",
    "requests": "the network is the hub library's business",
}
FORBIDDEN_NAMES = {
    "eval": "it runs code from text",
    "exec": "it runs code from text",
    "compile": "it runs code from text",
    "__import__": "say import",
    "input": "nothing asks questions",
}
FORBIDDEN_ATTRIBUTES = {
    "splitlines": "it splits at U+2028 and others; a line ends at LF",
    "read_text": "universal newlines; use mtkit.files",
    "readlines": "use mtkit.files",
}
FORBIDDEN_CALLS = {
    "torch.load": "it unpickles; models are safetensors",
    "torch.save": "it pickles; models are safetensors",
    "yaml.load": "it runs code from files",
    "os.system": "it goes through a shell",
    "os.popen": "it goes through a shell",
    "numpy.load": "it can unpickle; use memory maps",
    "np.load": "it can unpickle; use memory maps",
}
FORBIDDEN_ARGUMENTS = {
    "shell": (True, "it goes through a shell"),
    "weights_only": (False, "it unpickles"),
    "allow_pickle": (True, "it unpickles"),
    "trust_remote_code": (True, "it runs code from the hub"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def layer(module: str) -> int | None:
    """Place of a module among the layers; None for the package itself, which holds only the version."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    if parts[1] in BASE:
        return 0
    name = "cli" if parts[1] == "__main__" else parts[1]
    assert name in LAYERS, f"{module}: which place has it among {LAYERS}?"
    return LAYERS.index(name)


def imports(nodes: Iterator[ast.AST], module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported; `from a import b` gives `a.b`, which may be a module or a name in one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: no function bodies, no `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from itertools.chain.from_iterable([other, *at_import(other)] for other in child.orelse)
            continue
        yield child
        yield from at_import(child)


def owner(imported: str) -> str | None:
    """The module of mtkit that an imported name lives in, or None for one from elsewhere."""
    parts = imported.split(".")
    if parts[0] != "mtkit":
        return None
    for length in range(len(parts), 1, -1):
        path = REPOSITORY.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:length])
    return "mtkit"


def loaded_by(module: str, seen: set[str]) -> set[str]:
    """Top-level names of other projects that importing `module` imports, through other modules of mtkit too."""
    if module in seen:
        return set()
    seen.add(module)
    path = REPOSITORY.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = set()
    for _, imported in imports(at_import(tree(path)), module):
        inner = owner(imported)
        if inner is None:
            found.add(imported.split(".")[0])
        else:
            parents = itertools.accumulate(inner.split("."), "{}.{}".format)
            for loaded in parents:
                found |= loaded_by(loaded, seen)
    return found


def in_every_module(fault: Callable[[str, ast.AST], str | None]) -> list[str]:
    """Places where `fault` finds something, as `file:line: what`."""
    return [
        f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}: {found}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if (found := fault(module_name(path), node)) is not None
    ]


def test_the_code_is_found() -> None:
    assert len(MODULES) > 10
    assert {module_name(path).split(".")[1] for path in MODULES if path.parent != PACKAGE} == set(LAYERS) - {"base"}


def test_imports_run_one_way() -> None:
    faults = []
    for path in MODULES:
        module = module_name(path)
        own = layer(module)
        for line, imported in imports(ast.walk(tree(path)), module):
            other = owner(imported)
            if other is None or other == "mtkit":
                continue
            place = layer(other)
            if own is None or (place is not None and place > own):
                faults.append(f"{module}:{line} imports {other}, which stands above it")
            if "cli" in other.split(".")[1:2] and own != LAYERS.index("cli"):
                faults.append(f"{module}:{line} imports {other}; nothing imports the command line")
    assert not faults, "\n".join(faults)


def test_errors_stand_alone() -> None:
    assert not [name for _, name in imports(ast.walk(tree(PACKAGE / "errors.py")), "mtkit.errors") if owner(name)]


def test_starting_a_command_imports_nothing_slow() -> None:
    quick = [module_name(path) for path in MODULES if layer(module_name(path)) in (0, LAYERS.index("cli"))]
    faults = {module: slow for module in quick if (slow := loaded_by(module, set()) & SLOW_IMPORTS)}
    assert not faults, f"import these inside the function that needs them: {faults}"


def test_datasets_is_imported_where_it_is_used() -> None:
    faults = [
        f"{module_name(path)}:{line}"
        for path in MODULES
        for line, name in imports(at_import(tree(path)), module_name(path))
        if name.split(".")[0] == "datasets"
    ]
    assert not faults, f"datasets may be missing, so it is imported inside the function that needs it: {faults}"


def test_text_and_scores_do_without_torch() -> None:
    faults = [
        f"{module_name(path)}:{line}"
        for path in MODULES
        if module_name(path).split(".")[1:2] and module_name(path).split(".")[1] in TORCH_FREE and module_name(path) not in TORCH_ALLOWED
        for line, name in imports(ast.walk(tree(path)), module_name(path))
        if name.split(".")[0] == "torch"
    ]
    assert not faults, f"torch is for tensors, and these modules have none: {faults}"


def test_no_forbidden_import() -> None:
    faults = [
        f"{module_name(path)}:{line}: {name}: {FORBIDDEN_IMPORTS[name.split('.')[0]]}"
        for path in MODULES
        for line, name in imports(ast.walk(tree(path)), module_name(path))
        if name.split(".")[0] in FORBIDDEN_IMPORTS
    ]
    assert not faults, "\n".join(faults)


def test_no_forbidden_call() -> None:
    def fault(_module: str, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            reason = FORBIDDEN_CALLS.get(name) or FORBIDDEN_ATTRIBUTES.get(node.attr)
            return f"{name}: {reason}" if reason else None
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            return f"{node.id}: {FORBIDDEN_NAMES[node.id]}"
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN_ARGUMENTS and isinstance(node.value, ast.Constant):
            value, reason = FORBIDDEN_ARGUMENTS[node.arg]
            return f"{node.arg}={value}: {reason}" if node.value.value is value else None
        return None

    faults = in_every_module(fault)
    assert not faults, "\n".join(faults)


def test_files_are_opened_as_bytes() -> None:
    def fault(_module: str, node: ast.AST) -> str | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"):
            return None
        mode = node.args[1] if len(node.args) > 1 else next((keyword.value for keyword in node.keywords if keyword.arg == "mode"), None)
        is_binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
        return None if is_binary else "a text file has universal newlines and the locale's encoding; use mtkit.files"

    faults = in_every_module(fault)
    assert not faults, "\n".join(faults)


def test_only_the_command_line_prints_exits_and_reads_arguments() -> None:
    exits = {"print", "exit", "quit", "breakpoint", "sys.exit", "os._exit", "SystemExit"}

    def fault(module: str, node: ast.AST) -> str | None:
        if module.startswith(("mtkit.cli", "mtkit.__main__")):
            return None
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv":
            return "sys.argv"
        used = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if used is None or ast.unparse(used) not in exits:
            return None
        if module == "mtkit.training.signals" and ast.unparse(used) == "os._exit":  # a second signal asks to end now, not after the update
            return None
        return ast.unparse(used)

    faults = in_every_module(fault)
    assert not faults, "\n".join(faults)


def test_few_modules_touch_the_standard_streams() -> None:
    def fault(module: str, node: ast.AST) -> str | None:
        if module == "mtkit.files" or module.startswith("mtkit.cli") or not isinstance(node, ast.Attribute):
            return None
        name = ast.unparse(node)
        if name == "sys.stdin" and module == "mtkit.decoding.windows":  # it asks whether the next line is there already
            return None
        return name if name in {"sys.stdin", "sys.stdout", "sys.stderr"} else None

    faults = in_every_module(fault)
    assert not faults, "\n".join(faults)


def test_the_environment_is_read_in_few_places() -> None:
    def fault(module: str, node: ast.AST) -> str | None:
        if (
            module in ("mtkit.cores", "mtkit.distributed", "mtkit.faults", "mtkit.native.library")
            or module.startswith("mtkit.cli")
            or not isinstance(node, ast.Attribute)
        ):
            return None
        name = ast.unparse(node)
        return name if name in {"os.environ", "os.getenv", "os.putenv", "os.environb"} else None

    faults = in_every_module(fault)
    assert not faults, "\n".join(faults)


def test_no_file_is_too_long() -> None:
    lengths = {module_name(path): path.read_bytes().count(b"\n") for path in MODULES}
    assert not [f"{name} has {length} lines: it holds two things" for name, length in lengths.items() if length > MAX_FILE_LINES]


def test_no_function_is_too_long() -> None:
    def fault(_module: str, node: ast.AST) -> str | None:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        num_lines = (node.end_lineno or 0) - body[0].lineno + 1
        return f"{node.name} has {num_lines} lines: it holds two things" if num_lines > MAX_FUNCTION_LINES else None

    faults = in_every_module(fault)
    assert not faults, "\n".join(faults)


def test_every_module_has_its_tests() -> None:
    missing = []
    for path in MODULES:
        if path.name in ("__init__.py", "__main__.py"):  # exports and the way in: tests/cli/test_app.py runs them
            continue
        test = REPOSITORY / "tests" / path.parent.relative_to(PACKAGE) / f"test_{path.name}"
        if not test.is_file():
            missing.append(f"{path.relative_to(REPOSITORY)} has no {test.relative_to(REPOSITORY)}")
    assert not missing, "\n".join(missing)


def test_tests_are_no_package() -> None:
    assert not [str(path) for path in (REPOSITORY / "tests").rglob("__init__.py")], "pytest imports tests by path"
