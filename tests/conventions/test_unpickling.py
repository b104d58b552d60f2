"""Only shmq/objects.py unpickles, and only these places hand it something that they have checked.

To unpickle, to unmarshal and to evaluate is to run what somebody wrote.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shmq", "pyspark_shmq")

#: Modules -> their functions that run what they read; None: all.
DANGEROUS: dict[str, set[str] | None] = {
    "pickle": {"load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"},
    "_pickle": None,
    "cPickle": None,
    "cloudpickle": {"load", "loads", "Unpickler"},
    "dill": None,
    "jsonpickle": None,
    "shelve": None,
    "marshal": {"load", "loads"},
    "joblib": {"load"},
    "torch": {"load"},
    "numpy": {"load"},
    "pandas": {"read_pickle"},
    "yaml": {"load", "unsafe_load", "full_load", "load_all", "unsafe_load_all"},
    "multiprocessing.connection": None,
    "multiprocessing.managers": None,
    "multiprocessing.reduction": {"ForkingPickler", "loads", "recv_handle"},
    "pyspark.serializers": None,
    "pyspark.cloudpickle": {"load", "loads"},
    "code": None,
    "builtins": {"eval", "exec", "compile", "__import__"},
}
BUILTINS = {"eval", "exec", "compile"}

#: (file, name) that are harmless, with the reason.
PERMITTED = {
    ("shmq/objects.py", "pickle.loads"): "the one place",
    ("shmq/objects.py", "multiprocessing.reduction.ForkingPickler"): "its reducers, to pickle",
}

#: The functions of shmq/objects.py that unpickle -> who may name them, and who checked the seal.
HANDED = {
    "loads_sealed": {"shmq/queues/queue.py": "bytes of take_body, which returns none unsealed"},
    "unpack": {"shmq/pool/outcome.py": "Outcomes.read has compared the seal"},
    "unpack_error": {"shmq/pool/outcome.py": "Outcomes.read has compared the seal"},
    "unpack_nested": {"shmq/integrations/joblib.py": "a reducer of what is unpickled"},
    "unseal": {
        "shmq/queues/item.py": "it checks by itself",
        "shmq/pool/worker.py": "it checks by itself",
    },
}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dangers(tree: ast.AST) -> set[str]:
    """Every dangerous function that a file names, by whatever alias."""
    modules: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                modules[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
                if DANGEROUS.get(each.name, ()) is None:
                    found.add(each.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                if whole in DANGEROUS or any(name.startswith(f"{whole}.") for name in DANGEROUS):
                    modules[each.asname or each.name] = whole
                if _is_dangerous(node.module, each.name) or DANGEROUS.get(whole, ()) is None:
                    found.add(whole)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        if isinstance(node, ast.Attribute):
            module = _module_of(node.value, modules)
            if module is not None and _is_dangerous(module, node.attr):
                found.add(f"{module}.{node.attr}")
        if (  # getattr(pickle, "loads")
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) > 1
        ):
            module = _module_of(node.args[0], modules)
            if module in DANGEROUS:
                found.add(f"getattr({module})")
        if isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            for word in node.args:
                if isinstance(word, ast.Constant) and word.value in DANGEROUS:
                    found.add(f"import_module({word.value})")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.add("allow_pickle")
    return found


def _module_of(node: ast.expr, modules: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute):
        outer = _module_of(node.value, modules)
        return outer and f"{outer}.{node.attr}"
    return None


def _is_dangerous(module: str, name: str) -> bool:
    if module not in DANGEROUS:
        return False
    names = DANGEROUS[module]
    return names is None or name in names or name == "*"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_only_one_module_unpickles(path: Path) -> None:
    found = dangers(ast.parse(path.read_text()))
    wrong = {name for name in found if (name_of(path), name) not in PERMITTED}
    assert not wrong, f"{name_of(path)} runs what it reads: {wrong}; go by shmq/objects.py"


def test_what_is_permitted_is_still_there() -> None:
    for path, name in PERMITTED:
        assert name in dangers(ast.parse((ROOT / path).read_text())), (path, name)


@functools.cache
def taken(path: Path) -> set[str]:
    """The functions of shmq/objects.py that a file names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "shmq.objects":
            found.update(each.name for each in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "objects"
        ):
            found.add(node.attr)
    return found


@pytest.mark.parametrize("function", HANDED)
def test_each_caller_has_checked_the_seal(function: str) -> None:
    callers = {name_of(path) for path in sources() if function in taken(path)}
    callers.discard("shmq/objects.py")
    assert callers == set(HANDED[function]), f"a new caller of objects.{function} checks the seal?"


def test_every_function_that_unpickles_is_in_the_list() -> None:
    tree = ast.parse((ROOT / "shmq" / "objects.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found: set[str] = set()
    for _ in functions:
        for node in functions:
            words = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            loads = any(
                isinstance(each, ast.Attribute) and each.attr == "loads" for each in ast.walk(node)
            )
            if loads or words & (found - {node.name}):
                found.add(node.name)
    assert found | {"loads_sealed"} == set(HANDED)


PLANTS = (
    "import pickle\npickle.loads(b'')",
    "import pickle as p\nx = p.loads",
    "from pickle import loads as x",
    "from pickle import *",
    "import pickle\n_loads = pickle.loads",
    "import pickle\nclass A(pickle.Unpickler): pass",
    "from pickle import Unpickler",
    "import pickle\ngetattr(pickle, 'lo' + 'ads')",
    "import cloudpickle\ncloudpickle.loads(b'')",
    "import _pickle",
    "import dill",
    "from dill import loads",
    "import marshal\nmarshal.loads(b'')",
    "import numpy as np\nnp.load('x')",
    "def f(np): np.load('x', allow_pickle=True)",
    "import joblib\njoblib.load('x')",
    "import torch\ntorch.load('x')",
    "import yaml\nyaml.load('x')",
    "import pandas as pd\npd.read_pickle('x')",
    "from multiprocessing import connection",
    "from multiprocessing.connection import Client",
    "import multiprocessing.connection as c\nc.Client('x')",
    "from multiprocessing.reduction import ForkingPickler",
    "from multiprocessing import reduction\nreduction.ForkingPickler.loads(b'')",
    "eval('1')",
    "x = exec",
    "import builtins\nbuiltins.eval('1')",
    "import importlib\nimportlib.import_module('pickle')",
    "import shelve",
)


@pytest.mark.parametrize("text", PLANTS)
def test_a_plant_is_found(text: str) -> None:
    assert dangers(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.dumps(1)",
        "import json\njson.loads('1')",
        "import marshal\nmarshal.dumps(1)",
        "import re\nre.compile('x')",
        "from multiprocessing import reduction\nreduction.DupFd(1)",
        "import numpy as np\nnp.frombuffer(b'')",
    ],
)
def test_what_is_harmless_is_not(text: str) -> None:
    assert not dangers(ast.parse(text))
